"""Measure the CPU backend against jax.nn.dot_product_attention and against itself.

    python benchmarks/bench_cpu.py            # table in Markdown, about 3 minutes
    python benchmarks/bench_cpu.py --check    # exit status 1 if a promise is missed
    python benchmarks/bench_cpu.py --quick    # small sizes: does everything run?

All calls are jitted and run in one process. Each round runs every call once, in a fresh
random order with a pause before each: in a fixed order a call timed right after XLA's
large ones pays for the memory that XLA is still giving back. Figures are medians over
the rounds. Other load on the machine moves times far more than ratios, so ratios are
what is promised, and the share of the machine that others used is printed with them.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import machine
import numpy as np
import peak_memory
from shapes import SHAPES, Shape

import fkl_jax

Call = Callable[[], Any]
Implementation = Literal["ffi", "xla"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how often."""

    shape: Shape
    decode_shape: Shape
    memory_shape: str
    implementation: Implementation
    num_rounds: int
    gap_seconds: float
    num_cores: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promise:
    """Two calls to compare, by name.

    The figure is reference / ours (times faster), or with `at_most` ours / reference
    (times the cost).
    """

    what: str
    reference: str
    ours: str
    at_least: float | None = None
    at_most: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    reference: str
    ours: str
    figure: float
    unit: str
    required: str
    passed: bool | None


# --- calls to time --------------------------------------------------------------------


def alibi_soft_cap(slopes: jax.Array, cap: float) -> Callable[..., jax.Array]:
    """A user's own mod, as a user would write it."""
    return lambda score, b, h, q_idx, kv_idx: (
        cap * jnp.tanh((score - slopes[h] * (q_idx - kv_idx)) / cap)
    )


def random_block_mask(shape: Shape, density: float, seed: int) -> fkl_jax.BlockMask:
    """Exactly `density` of the 128 x 128 tiles of each head, in random places."""
    rows, columns = -(-shape.q_seq_len // 128), -(-shape.kv_seq_len // 128)
    rng = np.random.default_rng(seed)
    mask = np.zeros((shape.batch, shape.num_q_heads, rows, columns), bool)
    for head in mask.reshape(-1, rows * columns):
        head[rng.permutation(head.size)[: max(1, round(density * head.size))]] = True
    return fkl_jax.BlockMask(jnp.asarray(mask))


def gradient(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradient of sum(out ** 2) with respect to query, key and value."""
    return jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), argnums=(0, 1, 2))


def linear_gradient(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradient of a loss that does not need out: lets XLA drop one of its products."""
    return lambda cotangent, *qkv: jax.vjp(attend, *qkv)[1](cotangent)


def random_arrays(shape: Shape, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Standard normal query, key and value, float32."""
    keys = jax.random.split(jax.random.key(seed), 3)
    query, key, value = map(jax.random.normal, keys, (shape.query, *[shape.key] * 2))
    return query, key, value


def square_calls(options: Options) -> dict[str, Call]:
    """The calls on the main shape, by name."""
    qkv = random_arrays(options.shape, options.seed)
    half = tuple(x.astype(jnp.bfloat16) for x in qkv)
    cotangent = random_arrays(options.shape, options.seed + 1)[0]
    slopes = 2.0 ** -jnp.arange(1, options.shape.num_q_heads + 1)
    block_mask = random_block_mask(options.shape, 0.1, options.seed)
    full = functools.partial(fkl_jax.attention, implementation=options.implementation)
    jax_full = jax.nn.dot_product_attention
    calls: dict[str, Call] = {}

    def add(name: str, function: Callable[..., Any], *operands: Any) -> None:
        calls[name] = functools.partial(jax.jit(function), *operands)

    for mask, is_causal in (("causal", True), ("full", False)):
        theirs = functools.partial(jax_full, is_causal=is_causal)
        ours = functools.partial(full, causal=is_causal)
        modded = functools.partial(ours, score_mod=alibi_soft_cap(slopes, 20.0))
        add(f"jax.nn forward {mask}", theirs, *qkv)
        add(f"forward {mask}", ours, *qkv)
        add(f"jax.nn gradient {mask}", gradient(theirs), *qkv)
        add(f"gradient {mask}", gradient(ours), *qkv)
        add(f"bf16 forward {mask}", ours, *half)
        add(f"mod forward {mask}", modded, *qkv)
    add("jax.nn linear gradient full", linear_gradient(jax_full), cotangent, *qkv)
    add("linear gradient full", linear_gradient(full), cotangent, *qkv)
    add("bf16 gradient full", gradient(full), *half)
    masked = lambda mask, *qkv: full(*qkv, block_mask=mask)  # noqa: E731
    add("block mask forward", masked, block_mask, *qkv)
    return calls


def square_promises() -> list[Promise]:
    """What the calls on the main shape have to reach."""
    promises = []
    for name, at_least in (
        ("forward causal", 6.0),
        ("forward full", 3.0),
        ("gradient causal", 6.0),
        ("gradient full", 3.0),
        ("linear gradient full", None),
    ):
        promises.append(
            Promise(
                what=f"{name}: jax.nn / ours",
                reference=f"jax.nn {name}",
                ours=name,
                at_least=at_least,
            )
        )
    # Without bf16 instructions the two do the same work: 5 % is left to noise.
    bf16 = 1.4 if "avx512_bf16" in machine.cpu_flags() else 0.95
    for name, required in (
        ("forward causal", bf16),
        ("forward full", bf16),
        ("gradient full", None),
    ):
        promises.append(
            Promise(
                what=f"{name}: float32 / bf16",
                reference=name,
                ours=f"bf16 {name}",
                at_least=required,
            )
        )
    for name in ("forward causal", "forward full"):
        promises.append(
            Promise(
                what=f"{name}: with a user's ALiBi + soft cap lambda / plain",
                reference=name,
                ours=f"mod {name}",
                at_most=1.35,
            )
        )
    promises.append(
        Promise(
            what="forward: full / random block mask with 10 % of the tiles",
            reference="forward full",
            ours="block mask forward",
            at_least=6.0,
        )
    )
    return promises


def decode_calls(options: Options) -> dict[str, Call]:
    """One query row against a long cache, and two ways to just read that cache."""
    query, key, value = random_arrays(options.decode_shape, options.seed)
    ours = functools.partial(fkl_jax.attention, implementation=options.implementation)
    chunks = [
        chunk
        for array in (key, value)
        for chunk in np.array_split(np.asarray(array).reshape(-1), options.num_cores)
    ]
    pool = concurrent.futures.ThreadPoolExecutor(options.num_cores)
    calls: dict[str, tuple[Callable[..., Any], *tuple[jax.Array, ...]]] = {
        "jax.nn decode": (jax.nn.dot_product_attention, query, key, value),
        "decode": (ours, query, key, value),
        "read by XLA": (lambda *arrays: [jnp.sum(x) for x in arrays], key, value),
    }
    return {
        name: functools.partial(jax.jit(function), *operands)
        for name, (function, *operands) in calls.items()
    } | {
        # numpy's maximum gives up the lock and runs at the speed of its loads.
        "read by numpy": lambda: list(pool.map(np.max, chunks))
    }


# --- timing ---------------------------------------------------------------------------


def measure(calls: dict[str, Call], options: Options) -> dict[str, float]:
    """Median seconds of each call; the first run of each compiles and is not timed."""
    for name, call in calls.items():
        progress(f"compiling: {name}")
        jax.block_until_ready(call())
    order = random.Random(options.seed)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(options.num_rounds):
        progress(f"round {round_number + 1} of {options.num_rounds}")
        for name in order.sample(list(calls), len(calls)):
            time.sleep(options.gap_seconds)
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            samples[name].append(time.perf_counter() - start)
    progress("")
    return {name: statistics.median(values) for name, values in samples.items()}


def progress(text: str) -> None:
    """Show what is going on, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# --- rows of the table ----------------------------------------------------------------


def judge(
    figure: float, at_least: float | None = None, at_most: float | None = None
) -> tuple[str, bool | None]:
    """The requirement in words, and whether the figure meets it."""
    if at_least is not None:
        return f">= {at_least:g}", figure >= at_least
    if at_most is not None:
        return f"<= {at_most:g}", figure <= at_most
    return "", None


def ratio_row(promise: Promise, seconds: dict[str, float]) -> Row:
    reference, ours = seconds[promise.reference], seconds[promise.ours]
    is_cost = promise.at_most is not None
    figure = ours / reference if is_cost else reference / ours
    required, passed = judge(figure, promise.at_least, promise.at_most)
    return Row(
        what=promise.what,
        reference=f"{reference * 1e3:.1f} ms",
        ours=f"{ours * 1e3:.1f} ms",
        figure=figure,
        unit="x",
        required=required,
        passed=passed,
    )


def decode_rows(options: Options, seconds: dict[str, float]) -> list[Row]:
    """Against jax.nn, and bytes per second against the best plain reading."""
    shape = options.decode_shape
    what = f"decode, 1 row and {shape.kv_seq_len} keys"
    cache_gb = 2 * 4e-9 * shape.batch * shape.kv_seq_len
    cache_gb *= shape.num_kv_heads * shape.head_dim
    reading = min(seconds["read by XLA"], seconds["read by numpy"])
    figure = reading / seconds["decode"]
    required, passed = judge(figure, at_least=0.8)
    speed = Row(
        what=f"{what}: share of the measured read bandwidth",
        reference=f"{cache_gb / reading:.1f} GB/s",
        ours=f"{cache_gb / seconds['decode']:.1f} GB/s",
        figure=figure,
        unit="x",
        required=required,
        passed=passed,
    )
    against_jax = Promise(
        what=f"{what}: jax.nn / ours", reference="jax.nn decode", ours="decode"
    )
    return [ratio_row(against_jax, seconds), speed]


def memory_row(kind: str, options: Options) -> Row:
    progress(f"memory: {kind}")
    growth = peak_memory.growth_in_new_process(
        kind, options.memory_shape, options.implementation, options.num_cores
    )
    progress("")
    mib = growth / 2**20
    required, passed = judge(mib, at_most=96)
    return Row(
        what=f"{kind}, {SHAPES[options.memory_shape].kv_seq_len} tokens: "
        "peak memory beyond operands and results",
        reference="",
        ours=f"{mib:.0f} MiB",
        figure=mib,
        unit="MiB",
        required=required,
        passed=passed,
    )


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The table, with the machine named above it."""
    others = "?" if facts["others"] is None else f"{facts['others']:.0%}"
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, instruction set {facts['isa']}; "
        f"Python {facts['python']}, JAX {facts['jax']}, fkl_jax {facts['fkl_jax']}. "
        f"{facts['shape']}, float32 unless said otherwise, medians of "
        f"{facts['rounds']} rounds; load average {facts['load']} at the start, "
        f"{others} of the machine used by other processes.",
        "",
        *table(rows),
    ]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| what | reference | ours | figure | required | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = {True: "pass", False: "**FAIL**", None: ""}[row.passed]
        digits = 2 if row.unit in ("x", "s") else 0
        lines.append(
            f"| {row.what} | {row.reference} | {row.ours} "
            f"| {row.figure:.{digits}f} {row.unit} | {row.required} | {verdict} |"
        )
    return lines


# --- command line ---------------------------------------------------------------------


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the CPU backend against jax.nn and against itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--implementation", choices=("ffi", "xla"), default="ffi")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="square-4k")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cores", type=int, default=2, help="CPUs to use, where there are more"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, no verdicts")
    parser.add_argument("--check", action="store_true", help="fail on a missed promise")
    parser.add_argument("--json", action="store_true", help="JSON lines, not Markdown")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    machine.use_cores(args.cores)
    options = Options(
        shape=SHAPES["tiny" if args.quick else args.shape],
        decode_shape=SHAPES["tiny-decode" if args.quick else "decode-64k"],
        memory_shape="tiny-long" if args.quick else "long-16k",
        implementation=args.implementation,
        num_rounds=2 if args.quick else args.rounds,
        gap_seconds=0.0 if args.quick else args.gap,
        num_cores=machine.num_cores(),
        seed=args.seed,
    )
    facts = machine.facts()
    facts |= {"shape": str(options.shape), "rounds": options.num_rounds}
    load = machine.OtherLoad() if machine.read_text("/proc/stat") else None
    seconds = measure(square_calls(options), options)
    # A few milliseconds each, and some machines read memory at two speeds in turn.
    more = dataclasses.replace(options, num_rounds=3 * options.num_rounds)
    seconds |= measure(decode_calls(options), more)
    facts["others"] = load.share() if load else None
    rows = [ratio_row(promise, seconds) for promise in square_promises()]
    rows += decode_rows(options, seconds)
    rows += [memory_row(kind, options) for kind in peak_memory.KINDS]
    if args.quick:
        rows = [dataclasses.replace(row, required="", passed=None) for row in rows]
    if args.json:
        for record in [{"machine": facts}, *map(dataclasses.asdict, rows)]:
            print(json.dumps(record))
    else:
        print(markdown(rows, facts))
    return int(args.check and any(row.passed is False for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
