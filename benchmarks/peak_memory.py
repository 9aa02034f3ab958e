"""How far the first call of a compiled program lifts the peak of resident memory.

Runs as a process of its own and prints the bytes beyond operands and results:

    python benchmarks/peak_memory.py forward --shape long-16k

The gradient program takes the cotangent as an operand and returns out with the three
gradients, so that what is counted belongs to the operator and not to somebody's loss.
"""

import argparse
import ctypes
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from machine import read_text, use_cores
from shapes import SHAPES, Shape

import fkl_jax

KINDS = ("forward", "gradient")


def growth_in_new_process(
    kind: str, shape_name: str, implementation: str | None, cores: int
) -> int:
    """Run this file as a fresh process and return the bytes that it prints."""
    command = [sys.executable, __file__, kind, "--shape", shape_name]
    command += ["--cores", str(cores)]
    if implementation:
        command += ["--implementation", implementation]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def growth(
    kind: str, shape: Shape, implementation: Literal["ffi", "xla"] | None
) -> int:
    """Bytes by which the peak of the first call exceeds operands and results."""
    attend = functools.partial(fkl_jax.attention, implementation=implementation)
    sizes = (shape.query, shape.key, shape.key, shape.query)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    query, key, value, cotangent = map(jax.random.normal, keys, sizes)
    function: Callable[..., Any] = attend
    operands: tuple[jax.Array, ...] = (query, key, value)
    if kind == "gradient":
        function = functools.partial(output_and_gradients, attend)
        operands = (query, key, value, cotangent)
    compiled = jax.jit(function).lower(*operands).compile()
    jax.block_until_ready((operands, cotangent))  # or its making counts as growth
    before = restart_peak()
    results = jax.block_until_ready(compiled(*operands))
    result_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(results))
    return peak_bytes() - before - result_bytes


def output_and_gradients(
    attend: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cotangent: jax.Array,
) -> Any:
    out, pull_back = jax.vjp(attend, query, key, value)
    return out, pull_back(cotangent)


def restart_peak() -> int:
    """Let the peak start at the present resident size; return that size in bytes."""
    # What compiling freed but malloc kept would be used again by the call and hide
    # its growth.
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Peak of the resident size since the last restart."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", read_text("/proc/self/status"), re.M)
    if found is None:
        raise SystemExit("peak_memory: this kernel does not report VmHWM")
    return int(found[1]) * 1024


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Growth of peak memory, in bytes.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="long-16k")
    parser.add_argument("--implementation", choices=("ffi", "xla"))
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args(argv)
    use_cores(args.cores)
    jnp.zeros(()).block_until_ready()  # the backend's own start is not what is asked
    print(growth(args.kind, SHAPES[args.shape], args.implementation))


if __name__ == "__main__":
    main()
