"""Measure the CUDA backend against every peer that can be imported, in one process.

    python benchmarks/bench_gpu.py                         # Markdown table
    python benchmarks/bench_gpu.py --output results/h200   # and .jsonl, .md, .png
    python benchmarks/bench_gpu.py --only "causal,decode" --rounds 5
    python benchmarks/bench_gpu.py --family sm80           # the portable kernels
    python benchmarks/bench_gpu.py --check                 # status 1 if one misses

Inputs are random. Each call is enqueued often enough to fill `--fill` milliseconds and
the host waits once; peers and ours take turns, and the figure is the median over the
rounds. The GPU's clock moves with its power limit, so the ratio to a peer of the same
run is what counts, not the TFLOP/s. Backward figures count 2.5 times the FLOPs of the
forward and are the time of a whole gradient less that of the forward. What a workload
has to reach is in `targets.py`; where that is a ratio to another workload of ours, both
take turns, too.
"""

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fkl_jax
from fkl_jax import _config

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # `python -P` leaves it out
from targets import targets_of  # noqa: E402

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call; sizes of a layer of a real model, or those of the targets."""

    name: str
    batch: int = 2
    q_seq_len: int = 8192
    kv_seq_len: int = 8192
    num_q_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    backward: bool = False
    mod: str = ""
    live: float = 1.0  # share of the scores that is live, for the FLOPs

    @property
    def flops(self) -> float:
        scores = self.batch * self.num_q_heads * self.q_seq_len * self.kv_seq_len
        share = 0.5 if self.causal and self.live == 1.0 else self.live
        return 4.0 * scores * self.head_dim * share * (2.5 if self.backward else 1)

    @property
    def bytes(self) -> float:
        """Of keys and values, what decoding has to read."""
        row = (
            self.num_kv_heads * self.head_dim * np.dtype(jnp.dtype(self.dtype)).itemsize
        )
        return 2.0 * self.batch * self.kv_seq_len * row


def square(name: str, **sizes: Any) -> Workload:
    length = sizes.pop("length", 8192)
    return Workload(name=name, q_seq_len=length, kv_seq_len=length, **sizes)


def both_ways(name: str, **sizes: Any) -> list[Workload]:
    return [
        square(f"{name} full", **sizes),
        square(f"{name} causal", causal=True, **sizes),
        square(f"{name} full, backward", backward=True, **sizes),
        square(f"{name} causal, backward", causal=True, backward=True, **sizes),
    ]


WORKLOADS = [
    *both_ways("H=128 8k"),
    *both_ways("H=64 8k", batch=2, num_q_heads=32, num_kv_heads=32, head_dim=64),
    *both_ways("H=256 8k", num_q_heads=8, num_kv_heads=8, head_dim=256),
    square("H=128 causal 2k", batch=8, length=2048, causal=True),
    square("H=128 causal 16k", batch=1, length=16384, causal=True),
    square("llama3-8b 32/8 heads causal 8k", num_q_heads=32, num_kv_heads=8,
           causal=True),
    square("batch 32, 512 tokens causal", batch=32, length=512, causal=True),
    square("H=96 causal 8k", head_dim=96, causal=True),
    square("H=192 causal 8k", head_dim=192, causal=True),
    square("SoftCap 20 causal 8k", causal=True, mod="soft_cap"),
    square("ALiBi built-in causal 8k", causal=True, mod="alibi"),
    square("ALiBi lambda causal 8k", causal=True, mod="alibi_lambda"),
    square("window 1024, 8k", causal=True, mod="window", live=0.117),
    square("block mask 10 %, 8k", mod="blocks", live=0.1),
    square("block mask 10 %, 16k", batch=1, length=16384, mod="blocks", live=0.1),
    square("full 16k", batch=1, length=16384),
    square("8 documents by segment ids, 16k", batch=1, length=16384, causal=True,
           mod="segments", live=0.0625),
    square("8 documents as a batch", batch=8, length=2048, causal=True),
    Workload(name="decode 32 x 8192 keys", batch=32, q_seq_len=1, num_q_heads=32,
             num_kv_heads=8),
    Workload(name="decode 1 x 65536 keys", batch=1, q_seq_len=1, kv_seq_len=65536,
             num_q_heads=32, num_kv_heads=8),
]  # fmt: skip


# --- ours -----------------------------------------------------------------------------


def options(work: Workload) -> dict[str, Any]:
    """The keywords of `fkl_jax.attention` for a workload."""
    slopes = jnp.asarray(np.geomspace(0.5, 0.004, work.num_q_heads), jnp.float32)
    more: dict[str, Any] = {"causal": work.causal}
    if work.mod == "soft_cap":
        more["score_mod"] = fkl_jax.SoftCap(20.0)
    elif work.mod == "alibi":
        more["score_mod"] = fkl_jax.ALiBi(slopes)
    elif work.mod == "alibi_lambda":
        more["score_mod"] = lambda s, b, h, q_idx, kv_idx: (
            s - slopes[h] * (q_idx - kv_idx)
        )
    elif work.mod == "window":
        more["mask_mod"] = fkl_jax.SlidingWindow.last(1024)
    elif work.mod == "blocks":
        tiles = work.q_seq_len // 128
        mask = np.zeros((1, work.num_q_heads, tiles, tiles), bool)
        rng = np.random.default_rng(0)
        for head in mask.reshape(-1, tiles * tiles):
            head[rng.permutation(head.size)[: round(0.1 * head.size)]] = True
        more["block_mask"] = fkl_jax.BlockMask(jnp.asarray(mask))
    elif work.mod == "segments":
        ids = np.repeat(np.arange(8), work.q_seq_len // 8)[None].astype(np.int32)
        more |= {"q_segment_ids": jnp.asarray(ids), "kv_segment_ids": jnp.asarray(ids)}
    return more


def ours(work: Workload) -> Callable[..., Any]:
    more = options(work)
    return lambda q, k, v: fkl_jax.attention(q, k, v, implementation="ffi", **more)


# --- peers ----------------------------------------------------------------------------


def cudnn(work: Workload) -> Callable[..., Any] | None:
    if work.mod == "window":
        window = {"local_window_size": (1023, 0)}
    elif work.mod:
        return None
    else:
        window = {}
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=work.causal, implementation="cudnn", **window
    )


def tokamax(work: Workload) -> Callable[..., Any] | None:
    module = importlib.import_module("tokamax")
    if work.mod not in ("", "soft_cap"):
        return None
    more = {"logits_soft_cap": 20.0} if work.mod else {}
    return lambda q, k, v: module.dot_product_attention(
        q, k, v, is_causal=work.causal, **more
    )


JAX_PEERS = {"jax.nn cuDNN": cudnn, "tokamax": tokamax}


def torch_calls(work: Workload, gradient: bool) -> dict[str, Call]:
    """PyTorch's own attention (and flex_attention for mods) on the same GPU."""
    if work.q_seq_len == 1:
        return {}
    torch = importlib.import_module("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def tensor(length: int, heads: int) -> Any:
        shape = (work.batch, heads, length, work.head_dim)
        dtype = getattr(torch, work.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=gradient)

    q = tensor(work.q_seq_len, work.num_q_heads)
    k, v = (tensor(work.kv_seq_len, work.num_kv_heads) for _ in range(2))
    is_gqa = work.num_q_heads != work.num_kv_heads

    def timed(attend: Callable[..., Any]) -> Call:
        if not gradient:
            return lambda: attend(q, k, v)
        cotangent = torch.randn_like(q)

        def call() -> Any:
            return torch.autograd.grad(attend(q, k, v), (q, k, v), cotangent)

        return call

    def sdpa(backend: Any) -> Callable[..., Any]:
        def attend(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=work.causal, enable_gqa=is_gqa
                )

        return attend

    calls: dict[str, Call] = {}
    if not work.mod:
        calls["torch FlashAttention-2"] = timed(sdpa(SDPBackend.FLASH_ATTENTION))
    elif work.mod in ("soft_cap", "alibi", "alibi_lambda", "window"):
        flex = importlib.import_module("torch.nn.attention.flex_attention")

        def live(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            is_live = kv_idx <= q_idx
            return (
                is_live & (q_idx - kv_idx < 1024) if work.mod == "window" else is_live
            )

        blocks = flex.create_block_mask(
            live, None, None, work.q_seq_len, work.kv_seq_len
        )
        slopes = torch.rand(work.num_q_heads, device="cuda")
        score = {
            "soft_cap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
            "window": None,
        }.get(work.mod, lambda s, b, h, i, j: s - slopes[h] * (i - j))
        compiled = torch.compile(flex.flex_attention)
        calls["torch flex_attention"] = timed(
            lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=blocks)
        )
    return calls


# --- timing ---------------------------------------------------------------------------


def jax_call(attend: Callable[..., Any], work: Workload, gradient: bool) -> Call:
    keys = jax.random.split(jax.random.key(0), 4)

    def array(key: Any, length: int, heads: int) -> jax.Array:
        shape = (work.batch, length, heads, work.head_dim)
        return jax.random.normal(key, shape, jnp.dtype(work.dtype))

    q = array(keys[0], work.q_seq_len, work.num_q_heads)
    k = array(keys[1], work.kv_seq_len, work.num_kv_heads)
    v = array(keys[2], work.kv_seq_len, work.num_kv_heads)
    if not gradient:
        function = jax.jit(attend)
        return lambda: function(q, k, v)
    cotangent = array(keys[3], work.q_seq_len, work.num_q_heads)
    function = jax.jit(lambda g, *qkv: jax.vjp(attend, *qkv)[1](g))
    return lambda: function(cotangent, q, k, v)


def waiter(name: str) -> Callable[[Any], Any]:
    if name.startswith("torch"):
        torch = importlib.import_module("torch")
        return lambda _: torch.cuda.synchronize()
    return jax.block_until_ready


def seconds_each(
    calls: dict[str, Call], rounds: int, fill_ms: float
) -> dict[str, float]:
    """Median seconds of each call, those that fail left out with a word on stderr."""
    counts: dict[str, int] = {}
    for name, call in list(calls.items()):
        try:
            for _ in range(3):
                waiter(name)(call())
            start = time.perf_counter()
            waiter(name)(call())
            once = time.perf_counter() - start
            counts[name] = max(3, min(200, round(fill_ms * 1e-3 / once)))
        except Exception as e:  # a peer that cannot do a workload is no failure of ours
            if name.startswith("fkl_jax"):
                raise
            print(f"{name}: {str(e).splitlines()[0][:150]}", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(rounds):
        for name, count in counts.items():
            start = time.perf_counter()
            for _ in range(count):
                result = calls[name]()
            waiter(name)(result)
            samples[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(x) for name, x in samples.items()}


OTHER = "fkl_jax: "  # in front of the name of another workload of ours


def calls_of(
    work: Workload, gradient: bool, args: argparse.Namespace
) -> dict[str, Call]:
    calls = {"fkl_jax": jax_call(ours(work), work, gradient)}
    if args.alone:
        return calls
    for name, make in JAX_PEERS.items():
        try:
            attend = make(work)
        except ImportError as e:
            print(f"{name} left out: {e}", file=sys.stderr)
            continue
        if attend is not None:
            calls[name] = jax_call(attend, work, gradient)
    if args.torch:
        try:
            calls |= torch_calls(work, gradient)
        except Exception as e:
            print(f"torch: {str(e).splitlines()[0][:150]}", file=sys.stderr)
    return calls


def measure(work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    targets = targets_of(family(args), work.name)
    calls = calls_of(work, work.backward, args)
    for name in {t.against for t in targets} - {""}:
        other = next(w for w in WORKLOADS if w.name == name)
        calls[OTHER + name] = jax_call(ours(other), other, gradient=False)
    seconds = seconds_each(calls, args.rounds, args.fill)
    if work.backward:
        forward = dataclasses.replace(work, backward=False)
        less = seconds_each(calls_of(forward, False, args), args.rounds, args.fill)
        seconds = {n: s - less[n] for n, s in seconds.items() if n in less}
    mine = seconds["fkl_jax"]
    others = {n: seconds.pop(n) for n in list(seconds) if n.startswith(OTHER)}
    peers = {name: s for name, s in seconds.items() if name != "fkl_jax"}
    best = min(peers, key=peers.__getitem__, default=None)
    is_decode = work.q_seq_len == 1
    amount, unit = (work.bytes, "TB/s") if is_decode else (work.flops, "TFLOP/s")
    rate = {name: amount / s * 1e-12 for name, s in seconds.items()}
    required = []
    for target in targets:
        figure = rate["fkl_jax"]
        if target.against:
            cost = mine / others[OTHER + target.against]
            figure = 1 / cost if target.faster else cost
        required.append(
            {"text": target.words(figure), "passed": target.verdict(figure)}
        )
    return {
        "workload": work.name,
        "unit": unit,
        "rate": rate,
        "milliseconds": {name: 1e3 * s for name, s in seconds.items()},
        "best_peer": best,
        "ratio": peers[best] / mine if best else None,
        "required": required,
    }


def family(args: argparse.Namespace) -> str:
    """Of kernels; the best that the GPU has unless one is asked for."""
    major = jax.devices("cuda")[0].compute_capability.split(".")[0]
    return args.family or ("sm90" if major == "9" else "sm80")


# --- report ---------------------------------------------------------------------------


def markdown(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> str:
    names = list(dict.fromkeys(n for row in rows for n in row["rate"]))
    lines = [
        f"{facts['gpu']}, driver for CUDA {facts['driver']}, NVRTC {facts['nvrtc']}; "
        f"JAX {facts['jax']}, fkl_jax {facts['fkl_jax']}. bfloat16, random inputs, "
        f"medians of {facts['rounds']} rounds of one run, kernel family "
        f"{facts['family']}. `{facts['command']}`",
        "",
        "| workload | unit | "
        + " | ".join(names)
        + " | ratio to the best peer | required |",
        "|---" * (len(names) + 4) + "|",
    ]
    for row in rows:
        digits = 2 if row["unit"] == "TB/s" else 0
        cells = [
            f"{row['rate'][n]:.{digits}f}" if n in row["rate"] else "" for n in names
        ]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        required = "; ".join(
            f"{r['text']}: {'pass' if r['passed'] else '**MISS**'}"
            for r in row["required"]
        )
        lines.append(
            f"| {row['workload']} | {row['unit']} | {' | '.join(cells)} | {ratio} "
            f"| {required} |"
        )
    return "\n".join(lines)


def chart(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(n for row in rows for n in row["rate"]))
    shown = [row for row in rows if row["unit"] == "TFLOP/s"]
    figure = Figure(figsize=(9, 0.45 * len(shown) + 1.5), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for n, name in enumerate(names):
        at = [i + n * height for i in range(len(shown))]
        axes.barh(at, [row["rate"].get(name, 0) for row in shown], height, label=name)
    axes.set_yticks([i + 0.4 for i in range(len(shown))])
    axes.set_yticklabels([row["workload"] for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measure the CUDA backend against its peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--only", default="", help="workloads whose name has one of these, by commas"
    )
    parser.add_argument(
        "--family", choices=("sm80",), help="kernels of this family, not the best one"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fill", type=float, default=15, help="ms of a round per call")
    parser.add_argument("--torch", action="store_true", help="PyTorch's attention too")
    parser.add_argument("--alone", action="store_true", help="no peers")
    parser.add_argument("--check", action="store_true", help="fail on a missed target")
    parser.add_argument(
        "--output", type=pathlib.Path, help="stem of the files to write"
    )
    args = parser.parse_args(argv)
    if args.family:
        os.environ[_config.CUDA_FAMILY.name] = args.family
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as e:
        print(f"no CUDA device: {e}", file=sys.stderr)
        return 2
    from fkl_jax import _ext

    major, minor = _ext.nvrtc_version()[:2]
    driver = _ext.cuda_driver_version()
    facts = {
        "gpu": device.device_kind,
        "driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": f"{major}.{minor}",
        "jax": jax.__version__,
        "fkl_jax": fkl_jax.__version__,
        "family": family(args),
        "rounds": args.rounds,
        "command": " ".join(["python", "benchmarks/bench_gpu.py", *sys.argv[1:]]),
    }
    rows = []
    for work in WORKLOADS:
        if not any(part.strip() in work.name for part in args.only.split(",")):
            continue
        rows.append(measure(work, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    text = markdown(rows, facts)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".md").write_text(text + "\n")
        records = [facts, *rows]
        args.output.with_suffix(".jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in records)
        )
        chart(rows, args.output.with_suffix(".png"))
    missed = any(not r["passed"] for row in rows for r in row["required"])
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
