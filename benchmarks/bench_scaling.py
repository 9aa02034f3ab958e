"""Measure how a call and its gradient scale over the devices at hand, against one.

    python benchmarks/bench_scaling.py                       # all GPUs, or the CPU
    python benchmarks/bench_scaling.py --cpu-devices 4       # of this machine's cores
    python benchmarks/bench_scaling.py --output results/scaling   # and .json, .md

Each row puts the same call on 1, 2, 4, ... devices, its batch or its heads divided
(strong scaling), or gives each device as much as one has alone (weak). Efficiency is
the time on one device over that on n, divided by n for strong scaling. CPU devices
share the cores, so there only the overhead of dividing shows: the weak efficiency to
expect is 1 / n.

The row of 0 devices is the call without a mesh, on one device: next to it, the row of
one device shows what dividing itself costs.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fkl_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A call; `divided` is its axis that the devices share."""

    name: str
    batch: int
    seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    divided: str  # batch, heads
    dtype: str = "bfloat16"


def workloads(platform: str) -> list[Workload]:
    """Layers of a transformer in training; on a CPU, small ones."""
    if platform == "cpu":
        sizes = dict(seq_len=256, num_q_heads=8, num_kv_heads=8, head_dim=64)
        sizes |= dict(batch=4, dtype="float32")
    else:
        sizes = dict(seq_len=8192, num_q_heads=32, num_kv_heads=8, head_dim=128)
        sizes |= dict(batch=8)
    return [
        Workload(name=f"{axis} divided", divided=axis, **sizes)
        for axis in ("batch", "heads")
    ]


def counts(available: int) -> list[int]:
    """1, 2, 4, ... devices, and all of them."""
    powers = [2**k for k in range(available.bit_length()) if 2**k <= available]
    return powers if powers[-1] == available else [*powers, available]


def measure(workload: Workload, num_devices: int, weak: bool, rounds: int) -> Any:
    """Return milliseconds of the forward and of the gradient, or None if the devices do
    not divide the axis. No devices: the first one, without a mesh."""
    grown = max(num_devices, 1) if weak else 1
    batch, q_heads, kv_heads = (
        workload.batch,
        workload.num_q_heads,
        workload.num_kv_heads,
    )
    if workload.divided == "batch":
        batch, spec = batch * grown, PartitionSpec("devices")
    else:
        q_heads, kv_heads = q_heads * grown, kv_heads * grown
        spec = PartitionSpec(None, None, "devices")
    share = max(num_devices, 1)
    if (batch if workload.divided == "batch" else q_heads) % share:
        return None
    mesh = jax.make_mesh(
        (share,), ("devices",), axis_types=(AxisType.Auto,),
        devices=jax.devices()[:share],
    )  # fmt: skip
    divides = kv_heads % share == 0
    kv_spec = spec if divides or workload.divided == "batch" else PartitionSpec()

    def array(seed: int, heads: int, spec: PartitionSpec) -> jax.Array:
        shape = (batch, workload.seq_len, heads, workload.head_dim)
        make = jax.jit(
            lambda key: jax.random.normal(key, shape, jnp.dtype(workload.dtype)),
            out_shardings=NamedSharding(mesh, spec) if num_devices else None,
        )
        return make(jax.random.key(seed))

    operands = (
        array(0, q_heads, spec),
        array(1, kv_heads, kv_spec),
        array(2, kv_heads, kv_spec),
    )

    def forward(*qkv: jax.Array) -> jax.Array:
        return fkl_jax.attention(*qkv, causal=True)

    def gradient(*qkv: jax.Array) -> Any:
        out, pullback = jax.vjp(forward, *qkv)
        return pullback(out)

    return [_median_ms(jax.jit(f), operands, rounds) for f in (forward, gradient)]


def run(rounds: int) -> list[dict[str, Any]]:
    """Measure everything; one row per workload, kind of scaling and device count."""
    rows: list[dict[str, Any]] = []
    devices = jax.devices()
    for workload in workloads(devices[0].platform):
        for kind in ("strong", "weak"):
            alone = None
            for n in [0, *counts(len(devices))]:
                times = measure(workload, n, kind == "weak", rounds)
                if times is None:
                    continue
                alone = alone or times
                share = max(n, 1) if kind == "strong" else 1
                rows.append(
                    {
                        "workload": workload.name,
                        "scaling": kind,
                        "devices": n,
                        "forward_ms": times[0],
                        "gradient_ms": times[1],
                        "forward_efficiency": alone[0] / times[0] / share,
                        "gradient_efficiency": alone[1] / times[1] / share,
                    }
                )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, with what they were measured on."""
    device = jax.devices()[0]
    lines = [
        f"{len(jax.devices())} x {device.device_kind}; JAX {jax.__version__}, fkl_jax "
        f"{fkl_jax.__version__}; causal, medians.",
        "",
        "| call | scaling | devices | forward | efficiency | gradient | efficiency |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['workload']} | {r['scaling']} | {r['devices']} "
            f"| {r['forward_ms']:.2f} ms | {r['forward_efficiency']:.2f} "
            f"| {r['gradient_ms']:.2f} ms | {r['gradient_efficiency']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of a call")
    parser.add_argument("--cpu-devices", type=int, help="use so many CPU devices")
    parser.add_argument("--output", type=pathlib.Path, help="file name without suffix")
    args = parser.parse_args()
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    rows = run(args.rounds)
    text = table(rows)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".md").write_text(text + "\n")
        args.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def _median_ms(f: Any, operands: Sequence[jax.Array], rounds: int) -> float:
    jax.block_until_ready(f(*operands))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(f(*operands))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
