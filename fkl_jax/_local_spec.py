"""The spec of a device's part of a call, where a captured array is divided too.

A mod counts heads and batch elements globally. Where it reads an axis of a captured
array at exactly `h` or `b`, a device needs only its part of the array; the mod then
reads it at `h - first`, and `first`, the device's first head or batch element, is one
more captured array, a scalar.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from . import _trace
from ._spec import AttentionSpec, TracedMod, compile_mod

# ((capture, ((axis, ("b" or "h", size of the part)), ...)), ...)
Slices = tuple[tuple[int, tuple[tuple[int, tuple[str, int]], ...]], ...]


def indexed(spec: AttentionSpec) -> dict[int, dict[int, str]]:
    """By capture, the axes that every read of it indexes with exactly "b" or "h"."""
    found: dict[int, dict[int, str]] = {}
    for mod in (spec.score, spec.mask):
        nodes = () if mod is None or mod.program is None else mod.program.nodes
        for node in nodes:
            if node.op != "load":
                continue
            here = {
                axis: nodes[arg].data
                for axis, arg in enumerate(node.args)
                if nodes[arg].op == "input" and nodes[arg].data in ("b", "h")
            }
            before = found.setdefault(node.data[0], here)
            found[node.data[0]] = dict(before.items() & here.items())
    return found


def bases(spec: AttentionSpec, slices: Slices) -> dict[str, str]:
    """The roles of the scalars that `sliced` adds: by "b" or "h"."""
    used = sorted({name for _, axes in slices for _, (name, _) in axes})
    first = len(spec.capture_ndims)
    return {name: f"capture.{first + k}" for k, name in enumerate(used)}


@functools.lru_cache(maxsize=1024)
def sliced(spec: AttentionSpec, slices: Slices) -> AttentionSpec:
    """The spec of a call whose captures are parts, and whose last captures are the
    `bases`."""
    roles = bases(spec, slices)
    numbers = {name: int(role.partition(".")[2]) for name, role in roles.items()}
    score, mask, first = spec.score, spec.mask, spec.num_score_captures
    if score is not None:
        score = _rebased(score, 0, slices, numbers)
    if mask is not None:
        mask = _rebased(mask, first, slices, numbers).with_captures_from(first)
    return dataclasses.replace(
        spec,
        operands=(*spec.operands, *roles.values()),
        capture_ndims=(*spec.capture_ndims, *(0 for _ in roles)),
        score=score,
        mask=mask,
    )


# --- private -------------------------------------------------------------------------


def _rebased(
    mod: TracedMod, first: int, slices: Slices, numbers: dict[str, int]
) -> TracedMod:
    """The mod with its reads moved to the parts. It counts captures from `first`."""
    traced = mod.traced
    assert traced.scalar is not None
    parts = {capture - first: dict(axes) for capture, axes in slices}
    names = _trace.INPUTS[traced.kind]

    def load(capture: int, shape: Any, dtype: Any, *indices: Any) -> Any:
        return _trace.load_p.bind(
            *indices, capture=capture, shape=tuple(shape), dtype=np.dtype(dtype)
        )

    def function(*inputs: Any) -> Any:
        scalars = dict(zip(names, inputs, strict=True))

        def read(_: int, of: _trace.Load, indices: list[Any]) -> Any:
            shape = list(of.shape)
            for axis, (name, size) in parts.get(of.capture, {}).items():
                base = load(numbers[name] - first, (), np.int32)
                indices[axis], shape[axis] = scalars[name] - base, size
            return load(of.capture, shape, of.dtype, *indices)

        return _trace.evaluate_with_loads(traced.scalar, inputs, read)

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in traced.scalar.jaxpr.invars
    ]
    scalar = jax.make_jaxpr(function)(*avals)
    moved = _trace.TracedFunction(
        traced.kind, scalar, scalar, _trace.loads_of(scalar), None
    )
    return compile_mod(moved, function)
