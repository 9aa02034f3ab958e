"""Measure what a call costs beside its kernels: dispatch, first calls, new values.

    python benchmarks/bench_overhead.py            # Markdown table, under a minute
    python benchmarks/bench_overhead.py --check    # exit status 1 if one misses
    python benchmarks/bench_overhead.py --quick    # few rounds: does everything run?

On the default device: a GPU where there is one. Dispatch is the time of many calls in
a row, waited for once, divided by their number; ours and `x + 1` take turns and figures
are medians over the rounds. First calls are made in new processes with a cache folder
of their own: the first process finds it empty, the second one full.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import fkl_jax

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `python -P` leaves it out
from bench_cpu import Row, judge, table  # noqa: E402

Call = Callable[[], Any]
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def array(q_seq_len: int = 16, num_heads: int = 2, head_dim: int = 64) -> jax.Array:
    shape = (1, q_seq_len, num_heads, head_dim)
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def attend(x: jax.Array, **options: Any) -> jax.Array:
    return fkl_jax.attention(x, x, x, causal=True, implementation="ffi", **options)


# --- dispatch -------------------------------------------------------------------------


def dispatch_calls() -> dict[str, Call]:
    """By name; 16 rows go to the decoding kernel, 256 to a tiled one."""
    few, more = array(16), array(256)
    add, jitted = jax.jit(lambda x: x + 1), jax.jit(attend)
    step = jax.jit(jax.grad(lambda x: attend(x).astype(jnp.float32).sum()))
    add_step = jax.jit(jax.grad(lambda x: (x * x).astype(jnp.float32).sum()))
    return {
        "jitted x + 1": lambda: add(few),
        "jitted, 16 rows": lambda: jitted(few),
        "jitted, 256 rows": lambda: jitted(more),
        "jitted gradient of x * x": lambda: add_step(more),
        "jitted gradient, 256 rows": lambda: step(more),
        "eager x + 1": lambda: few + 1,
        "eager, 16 rows": lambda: attend(few),
        "eager, 16 rows, SoftCap": lambda: attend(few, score_mod=fkl_jax.SoftCap(20.0)),
    }


def dispatch_seconds(
    calls: dict[str, Call], rounds: int, repeats: int
) -> dict[str, float]:
    """Median seconds of a call."""
    for call in calls.values():
        for _ in range(3):
            jax.block_until_ready(call())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeats):
                result = call()
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(x) for name, x in samples.items()}


def dispatch_rows(seconds: dict[str, float]) -> list[Row]:
    rows = []
    for reference, ours, at_most in (
        ("jitted x + 1", "jitted, 16 rows", 1.2),
        ("jitted x + 1", "jitted, 256 rows", 1.2),
        ("jitted gradient of x * x", "jitted gradient, 256 rows", None),
        ("eager x + 1", "eager, 16 rows", 3.0),
        ("eager x + 1", "eager, 16 rows, SoftCap", None),
    ):
        figure = seconds[ours] / seconds[reference]
        required, passed = judge(figure, at_most=at_most)
        rows.append(
            Row(
                what=f"{ours}, against {reference}",
                reference=f"{1e6 * seconds[reference]:.1f} us",
                ours=f"{1e6 * seconds[ours]:.1f} us",
                figure=figure,
                unit="x",
                required=required,
                passed=passed,
            )
        )
    return rows


# --- first calls ----------------------------------------------------------------------

MODS: tuple[Callable[..., Any], ...] = (
    lambda s, b, h, q, k: s + jnp.sin(0.25 * (q - k).astype(jnp.float32)),
    lambda s, b, h, q, k: jnp.where((q + k) % 3 == 0, jnp.tanh(s), s * 0.5),
    lambda s, b, h, q, k: s * jax.nn.sigmoid(s) - 0.01 * abs(q - k),
)


def first_calls() -> dict[str, list[float]]:
    """Seconds of the first call of each mod, and of XLA's compilation in it.

    A call without them comes first: loading libraries is no mod's fault.
    """
    compiles: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiles.append(seconds) if event == _COMPILE_EVENT else None
        )
    )
    x = array(256)
    jax.block_until_ready(jax.jit(attend)(x))
    found: dict[str, list[float]] = {"total": [], "xla": []}
    for mod in MODS:
        before = len(compiles)
        function = jax.jit(lambda x, mod=mod: attend(x, score_mod=mod))
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        found["total"].append(time.perf_counter() - start)
        found["xla"].append(sum(compiles[before:]))
    return found


def each(seconds: list[float]) -> str:
    return " / ".join(f"{1e3 * s:.0f}" for s in seconds) + " ms"


def first_call_rows() -> list[Row]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "full"):
            done = subprocess.run(
                [sys.executable, "-P", __file__, "--first-calls"],
                env={**os.environ, "FKL_JAX_CACHE_DIR": folder},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            found[cache] = json.loads(done.stdout.splitlines()[-1])
    rows = []
    cold = max(found["empty"]["total"])
    required, passed = judge(cold, at_most=1.5)
    rows.append(
        Row(
            what="a new mod's first call, three mods; reference: XLA's part",
            reference=each(found["empty"]["xla"]),
            ours=each(found["empty"]["total"]),
            figure=cold,
            unit="s",
            required=required,
            passed=passed,
        )
    )
    warm = found["full"]
    rest = [1e3 * (t - x) for t, x in zip(warm["total"], warm["xla"], strict=True)]
    required, passed = judge(max(rest), at_most=60.0)
    rows.append(
        Row(
            what="the same with a full disk cache, beyond XLA's part",
            reference=each(warm["xla"]),
            ours=each(warm["total"]),
            figure=max(rest),
            unit="ms",
            required=required,
            passed=passed,
        )
    )
    return rows


# --- new values -----------------------------------------------------------------------


def compiles_of_new_values(count: int) -> int:
    """Programs and kernels that `count` eager and `count` jitted calls with values of
    their own compile, after one of each."""
    compiled = 0

    def listen(event: str, seconds: float, **_: Any) -> None:
        nonlocal compiled
        compiled += event == _COMPILE_EVENT

    x = array(64)

    def call(x: Any, n: Any) -> jax.Array:
        """Mods, scale, offset and lengths from one number."""
        f = n * jnp.float32(0.5)
        return fkl_jax.attention(
            x,
            x,
            x,
            score_mod=(fkl_jax.SoftCap(20.0 + f), fkl_jax.ALiBi(f / 64)),
            mask_mod=fkl_jax.SlidingWindow(n, n + 1),
            scale=0.1 + f / 16,
            q_offset=n,
            kv_seq_lengths=jnp.full((1,), 64 - n % 50, jnp.int32),
            implementation="ffi",
        )

    jitted = jax.jit(call)
    numbers = [jnp.int32(n) for n in range(1, count + 2)]
    for n in numbers[:1]:
        jax.block_until_ready((call(x, n), jitted(x, n)))
    jax.monitoring.register_event_duration_secs_listener(listen)
    before = kernels_compiled()
    for n in numbers[1:]:
        jax.block_until_ready((call(x, n), jitted(x, n)))
    return compiled + kernels_compiled() - before


def kernels_compiled() -> int:
    from fkl_jax import _ext

    return int(_ext.cuda_counts()["compiled"])


def new_values_row(count: int) -> Row:
    compiles = compiles_of_new_values(count)
    required, passed = judge(compiles, at_most=0)
    return Row(
        what=f"programs and kernels compiled by {count} eager and {count} jitted calls "
        "with new values",
        reference="",
        ours=str(compiles),
        figure=compiles,
        unit="",
        required=required,
        passed=passed,
    )


# --- command line ---------------------------------------------------------------------


def markdown(rows: Sequence[Row], args: argparse.Namespace) -> str:
    command = " ".join(["python", "benchmarks/bench_overhead.py", *sys.argv[1:]])
    head = (
        f"{jax.devices()[0].device_kind}; JAX {jax.__version__}, fkl_jax "
        f"{fkl_jax.__version__}. bfloat16, 2 heads, H=64; medians of {args.rounds} "
        f"rounds of {args.repeats} calls. `{command}`"
    )
    return "\n".join([head, "", *table(rows)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measure what a call costs beside its kernels.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=200, help="calls of a round")
    parser.add_argument("--quick", action="store_true", help="few rounds, no verdicts")
    parser.add_argument("--check", action="store_true", help="fail on a missed target")
    parser.add_argument("--json", action="store_true", help="JSON lines, not Markdown")
    parser.add_argument("--output", type=pathlib.Path, help="file for the table")
    parser.add_argument("--first-calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.first_calls:
        print(json.dumps(first_calls()))
        return 0
    if args.quick:
        args.rounds, args.repeats = 2, 5
    seconds = dispatch_seconds(dispatch_calls(), args.rounds, args.repeats)
    rows = [*dispatch_rows(seconds), *first_call_rows(), new_values_row(50)]
    if args.quick:
        rows = [dataclasses.replace(row, passed=None) for row in rows]
    if args.json:
        text = "\n".join(json.dumps(dataclasses.asdict(row)) for row in rows)
    else:
        text = markdown(rows, args)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")
    return 1 if args.check and any(row.passed is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
