"""Automatic sharding: how a call is divided when XLA partitions a program over a mesh.

Batch axes, query heads and vmap axes may be sharded in any way; each device then makes
an ordinary call on its part, and nothing is communicated but the sums of gradients of
what several devices read. Where the query is sharded, the call is: everything else
follows it. Key and value are divided with the query heads as far as they come so, and
are whole on the devices beyond. Lengths and head dims are never divided.

`jax.experimental.custom_partitioning` is the mechanism; what it lacks is around it:
batching (`custom_vmap`), derivatives (`custom_jvp`), and a name that says which call it
is, without which the persistent compilation cache would take one for another.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _avals, _local_spec, _primitives
from ._spec import AttentionSpec

Axes = tuple[str, ...]  # of a mesh


def forward(
    spec: AttentionSpec, operands: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Out and lse, divided as the program is."""
    out, lse = _call(_Call(spec, None), operands)
    return out, lse


def backward(
    spec: AttentionSpec, operands: Sequence[Any], results: tuple[str, ...]
) -> Sequence[jax.Array]:
    """The gradients named in `results`; `operands` ends with out, lse, dout, dlse."""
    return _call(_Call(spec, results), operands)


# --- private -------------------------------------------------------------------------

# The axes of each role after those of vmap: B all batch axes, t and s lengths, n and k
# heads, h and e head dims; a dot is an axis that is the role's own.
_LETTERS = {
    "query": "Btnh",
    "key": "Bskh",
    "value": "Bske",
    "scale": "",
    "bias": "Bnts",
    "q_segment_ids": "Bt",
    "kv_segment_ids": "Bs",
    "q_seq_lengths": "B",
    "kv_seq_lengths": "B",
    "q_offset": "B",
    "kv_offset": "B",
    "sinks": "n",
    "block_mask": "Bn..",
    "batch_index": "B",
    "head_index": "n",
    "out": "Btne",
    "lse": "Bnt",
    "dout": "Btne",
    "dlse": "Bnt",
}


# Axes that may come divided in any way: what is made of it is decided in `_partition`.
_FREE = ("capture_", "doutx", "dlsex")


@dataclasses.dataclass(frozen=True)
class _Call:
    """One of the two primitives with its parameters; `results` is None in the
    forward."""

    spec: AttentionSpec
    results: tuple[str, ...] | None

    @property
    def operands(self) -> tuple[str, ...]:
        saved = () if self.results is None else _primitives.SAVED
        return (*self.spec.operands, *saved)

    @property
    def returned(self) -> tuple[str, ...]:
        return ("out", "lse") if self.results is None else self.results

    @property
    def name(self) -> str:
        """Different for calls that differ, and for versions of this package: it
        becomes part of the key of the compilation cache, which does not see what
        `_partition` does."""
        text = "\n".join([version("fkl_jax"), self.spec.text, str(self.results)])
        kind = "forward" if self.results is None else "backward"
        return f"fkl_{kind}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def bind(self, operands: Sequence[Any], spec: AttentionSpec) -> list[jax.Array]:
        if self.results is None:
            return list(_primitives.forward(spec, operands))
        return _primitives.backward(spec, operands, self.results)


def _call(call: _Call, operands: Sequence[Any]) -> Sequence[jax.Array]:
    # Inside shard_map there is nothing left to divide, or (in part manual) nothing that
    # XLA could divide: there it would end the process.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return call.bind(operands, call.spec)
    return _partitioned(call)(*operands)


@functools.lru_cache(maxsize=4096)
def _partitioned(call: _Call) -> Callable[..., Sequence[jax.Array]]:
    def bind(*operands: Any) -> tuple[jax.Array, ...]:
        return tuple(call.bind(operands, call.spec))

    divided = custom_partitioning(bind)
    divided.def_partition(
        functools.partial(_partition, call),
        # Decoded here: JAX raises where XLA divides an array by part of a mesh axis.
        decode_shardings=False,
        sharding_rule=functools.partial(_sharding_rule, call),
    )

    @custom_vmap
    def batched(*operands: Any) -> Any:
        return divided(*operands)

    @batched.def_vmap
    def _(_: int, mapped: Sequence[bool], *operands: Any) -> Any:
        # As the primitives have it: of size 1 where it is not mapped.
        operands = tuple(
            x if is_mapped else jnp.expand_dims(x, 0)
            for x, is_mapped in zip(operands, mapped, strict=True)
        )
        return batched(*operands), (True,) * len(call.returned)

    def named(*operands: Any) -> Any:
        return batched(*operands)

    named.__name__ = named.__qualname__ = call.name
    jitted = jax.jit(named)

    @jax.custom_jvp
    def differentiable(*operands: Any) -> Any:
        return jitted(*operands)

    def jvp(primals: Any, tangents: Any) -> Any:
        moves = [None if isinstance(t, SymbolicZero) else t for t in tangents]
        out = jitted(*primals)
        return out, _primitives.tangents(call.spec, call.results, primals, moves)

    differentiable.defjvp(jvp, symbolic_zeros=True)
    return differentiable


class _Factors:
    """Names for the axes of a call's arrays: axes of one name are divided alike."""

    def __init__(self, call: _Call, shapes: Sequence[Sequence[int]]):
        self.call = call
        self.shapes = dict(zip(call.operands, map(tuple, shapes), strict=True))
        spec = call.spec
        query, key, value = (self.shapes[r] for r in ("query", "key", "value"))
        self.num_lead = len(query) - spec.base_ndim("query")
        lead: list[int] = [1] * self.num_lead
        for shape in self.shapes.values():
            for axis, size in enumerate(shape[: self.num_lead]):
                lead[axis] = size if lead[axis] == 1 else lead[axis]
        *batch, t, n, h = query[self.num_lead :]
        s, k, e = value[-3:]
        self.lead = [f"v{axis}" for axis in range(self.num_lead)]
        self.batch = [f"b{axis}" for axis in range(spec.num_batch_dims)]
        self.sizes = dict(zip(self.lead + self.batch, [*lead, *batch], strict=True))
        self.sizes |= {"t": t, "n": n, "h": h, "s": s, "k": k, "e": e}
        self.num_heads, self.num_kv_heads = n, k

    def of(self, role: str, tied: bool = True) -> list[str]:
        """The names of an operand's axes. An axis that is the same for all has one of
        its own, and so have those of a cotangent unless it is tied to the rest."""
        shape, own = self.shapes[role], role.replace(".", "_")
        if role in ("dout", "dlse") and not tied:
            return [f"{own}x{axis}" for axis in range(len(shape))]
        return [
            name if size == self.sizes.get(name, size) else f"{own}x{axis}"
            for axis, (name, size) in enumerate(
                zip(self._full(role), shape, strict=True)
            )
        ]

    def of_result(self, role: str) -> list[str]:
        """The names of a result's axes: those of vmap are all there."""
        if role in ("out", "lse"):
            return self._full(role)
        return self.lead + self.of(role)[self.num_lead :]

    def _full(self, role: str) -> list[str]:
        if role.startswith("capture."):
            own, count = role.replace(".", "_"), len(self.shapes[role])
            return self.lead + [f"{own}x{k}" for k in range(self.num_lead, count)]
        names = list(self.lead)
        for letter in _LETTERS[role]:
            if letter == "B":
                names += self.batch
            elif letter == ".":
                names.append(f"{role}x{len(names)}")
            else:
                # As many key heads as query heads: they are divided alike.
                one = letter == "k" and self.num_kv_heads == self.num_heads
                names.append("n" if one else letter)
        return names


def _sharding_rule(
    call: _Call, _: Mesh, operand_types: Sequence[Any], result_types: Sequence[Any]
) -> SdyShardingRule:
    """What XLA's propagation of shardings may assume."""
    factors = _Factors(call, [t.shape for t in operand_types])
    # A cotangent that comes with another sharding would draw the query along.
    operands = [factors.of(role, tied=False) for role in call.operands]
    results = [factors.of_result(role) for role in call.returned]
    order = dict.fromkeys(name for names in operands + results for name in names)
    free = {*factors.lead, *factors.batch, "n", "k"}
    whole = tuple(
        name for name in order if name not in free and not name.startswith(_FREE)
    )
    return SdyShardingRule(
        tuple(ArrayMapping(*names) for names in operands),
        tuple(ArrayMapping(*names) for names in results),
        need_replication_factors=whole,
    )


class _Plan:
    """Which mesh axes divide what."""

    def __init__(self, call: _Call, mesh: Mesh, args: Sequence[Any]):
        self.call, self.mesh = call, mesh
        self.factors = _Factors(call, [a.shape for a in args])
        self.given = {
            role: _mesh_axes(a, mesh)
            for role, a in zip(call.operands, args, strict=True)
        }
        self.axes: dict[str, Axes] = {}
        for role in call.operands:  # the query is the first
            self._follow(role)
        heads, kv_heads = self.factors.num_heads, self.factors.num_kv_heads
        self.heads = self.kv_heads = self.axes.get("n", ())
        if heads != kv_heads:
            # Key heads that come whole stay whole: their gradient is then one sum.
            given = [self.given[role][-2] for role in ("key", "value")]
            both = zip(self.heads, *given, strict=False)
            same = list(itertools.takewhile(lambda axes: len(set(axes)) == 1, both))
            self.kv_heads = self._prefix(self.heads[: len(same)], kv_heads)
        # Devices along these read the same key heads, or parts of them.
        self.shared = self.heads[len(self.kv_heads) :]
        self.axes["k"] = self.kv_heads
        self.batch = tuple(a for b in self.factors.batch for a in self.axes.get(b, ()))
        self.num_local_heads = heads // self._count(self.heads)
        self.slices = dict(self._slices())

    def _follow(self, role: str) -> None:
        """Divide what is not decided yet as an operand comes."""
        factors = self.factors
        own = [*factors.batch, "n"] if role == "query" else []
        for name, axes in zip(factors.of(role), self.given[role], strict=True):
            if name in self.axes or name not in (*factors.lead, *own):
                continue
            taken = {a for other in self.axes.values() for a in other}
            free = tuple(a for a in axes if a not in taken)
            self.axes[name] = self._prefix(free, factors.sizes[name])

    def _count(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def _prefix(self, axes: Axes, size: int) -> Axes:
        """The most of the axes, from the first, that divide a size."""
        for end in range(len(axes), 0, -1):
            if size % self._count(axes[:end]) == 0:
                return axes[:end]
        return ()

    def _slices(self) -> Iterator[tuple[int, dict[int, tuple[str, int]]]]:
        """Captures of which a device needs only its part, and has only that: by axis,
        the index that reads it and the size of the part."""
        divided = {"h": self.heads}
        # Part of the flattened batch is one piece if no batch axis in front of the last
        # that is divided is longer than its devices are many.
        batch = [(b, self.axes.get(b, ())) for b in self.factors.batch]
        last = max((i for i, (_, axes) in enumerate(batch) if axes), default=-1)
        sizes = self.factors.sizes
        if all(sizes[b] == self._count(axes) for b, axes in batch[: max(last, 0)]):
            divided["b"] = self.batch
        total = math.prod(sizes[b] for b in self.factors.batch)
        full = {"h": self.factors.num_heads, "b": total}
        for capture, index_of in _local_spec.indexed(self.call.spec).items():
            role = f"capture.{capture}"
            lead = self.factors.num_lead
            given, shape = self.given[role][lead:], self.factors.shapes[role][lead:]
            found = {
                axis: (name, shape[axis] // self._count(given[axis]))
                for axis, name in index_of.items()
                if given[axis]
                and given[axis] == divided.get(name)
                and shape[axis] == full[name]
            }
            if found:
                yield capture, found

    def of(self, role: str, is_result: bool = False) -> list[Axes]:
        """The mesh axes that divide each axis of an array."""
        names = self.factors.of_result(role) if is_result else self.factors.of(role)
        axes = [self.axes.get(name, ()) for name in names]
        if role.startswith("capture."):
            for axis in self.slices.get(int(role.partition(".")[2]), {}):
                at = self.factors.num_lead + axis
                axes[at] = self.given[role][at]
        return axes

    def sharding(self, role: str, is_result: bool = False) -> NamedSharding:
        axes = self.of(role, is_result)
        entries = [a if len(a) > 1 else a[0] if a else None for a in axes]
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def summed(self, role: str) -> Axes:
        """The mesh axes along which each device has a part of a gradient."""
        own = {a for axes in self.of(role, is_result=True) for a in axes}
        return tuple(a for a in (*self.batch, *self.heads) if a not in own)


def _partition(
    call: _Call, mesh: Mesh, args: Sequence[Any], _: Any
) -> tuple[Mesh, Any, Any, Any]:
    """What each device does, and with which parts: see `custom_partitioning`."""
    if mesh.empty:  # the arrays come from different meshes
        devices = args[0].sharding.devices_indices_map(tuple(args[0].shape))
        mesh = Mesh(np.array(list(devices)), ("devices",))
    plan = _Plan(call, mesh, args)

    def local(*operands: Any) -> tuple[jax.Array, ...]:
        with _avals.off_mesh():
            return _local_call(plan, dict(zip(call.operands, operands, strict=True)))

    return (
        mesh,
        local,
        tuple(plan.sharding(role, is_result=True) for role in call.returned),
        tuple(plan.sharding(role) for role in call.operands),
    )


def _local_call(plan: _Plan, named: dict[str, Any]) -> tuple[jax.Array, ...]:
    call = plan.call
    whole = {role: named[role] for role in ("key", "value")}
    index = _kv_index(plan) if plan.shared else None
    if index is not None:
        named |= {role: _take_heads(x, index) for role, x in whole.items()}
    spec = call.spec
    if plan.slices:
        spec = _local_spec.sliced(spec, _hashable(plan.slices))
        firsts = {
            "h": lambda: named["head_index"][..., 0],
            "b": lambda: named["batch_index"][(..., *(0,) * spec.num_batch_dims)],
        }
        bases = _local_spec.bases(call.spec, _hashable(plan.slices))
        # The spec's operands come before those that the backward adds.
        own = {role: named[role] for role in call.spec.operands}
        own |= {role: firsts[name]() for name, role in bases.items()}
        named = own | named
    results = dict(
        zip(call.returned, call.bind(list(named.values()), spec), strict=True)
    )
    if call.results is None:
        return tuple(results.values())
    if index is not None:
        for role in whole.keys() & results.keys():
            results[role] = _put_heads(results[role], index, whole[role].shape[-2])
    by_axes: dict[Axes, list[str]] = {}
    for role in results:
        by_axes.setdefault(plan.summed(role), []).append(role)
    for axes, roles in by_axes.items():
        if axes:
            sums = jax.lax.psum([results[role] for role in roles], axes)
            results |= dict(zip(roles, sums, strict=True))
    return tuple(results.values())


def _hashable(slices: dict[int, dict[int, tuple[str, int]]]) -> Any:
    return tuple((c, tuple(axes.items())) for c, axes in slices.items())


def _kv_index(plan: _Plan) -> jax.Array:
    """Which of the key heads at hand the local query heads read: one for each run of
    query heads, all runs of one length."""
    group = plan.factors.num_heads // plan.factors.num_kv_heads
    run = math.gcd(plan.num_local_heads, group)
    first = jax.lax.axis_index(plan.heads) * plan.num_local_heads
    kv_heads = plan.factors.num_kv_heads // plan._count(plan.kv_heads)
    first_kv = jax.lax.axis_index(plan.kv_heads) * kv_heads if plan.kv_heads else 0
    runs = jnp.arange(plan.num_local_heads // run, dtype=jnp.int32)
    return (first + run * runs) // group - first_kv


def _take_heads(x: jax.Array, index: jax.Array) -> jax.Array:
    if index.size == 1:
        return jax.lax.dynamic_slice_in_dim(x, index[0], 1, axis=x.ndim - 2)
    return jnp.take(x, index, axis=-2, mode="clip")


def _put_heads(x: jax.Array, index: jax.Array, count: int) -> jax.Array:
    whole = jnp.zeros((*x.shape[:-2], count, x.shape[-1]), x.dtype)
    if index.size == 1:
        return jax.lax.dynamic_update_slice_in_dim(whole, x, index[0], x.ndim - 2)
    return whole.at[..., index, :].add(x, mode="clip")


def _mesh_axes(a: Any, mesh: Mesh) -> list[Axes]:
    """The mesh axes that divide each axis of an array; none for an axis that is divided
    in another way than by whole mesh axes."""
    nothing: list[Axes] = [()] * len(a.shape)
    if a.sharding is None:
        return nothing
    try:
        parts = a.sharding.devices_indices_map(tuple(a.shape))
    except ValueError:  # not into equal parts
        return nothing
    starts = np.array(
        [[part.start or 0 for part in parts[d]] for d in mesh.devices.flat], np.int64
    ).reshape(*mesh.devices.shape, len(a.shape))
    size_of = a.sharding.shard_shape(tuple(a.shape))
    return [
        _dividing(starts[..., axis], size, mesh.axis_names)
        for axis, size in enumerate(size_of)
    ]


def _dividing(starts: np.ndarray, size: int, names: Sequence[str]) -> Axes:
    """The mesh axes, in order, that count parts which begin at `starts`, (*mesh)."""
    moving = [k for k in range(starts.ndim) if np.any(np.diff(starts, axis=k))]
    # The axis along which the parts follow each other is the last.
    moving.sort(key=lambda k: -np.abs(np.diff(starts, axis=k)).max())
    where = np.indices(starts.shape)
    number = np.zeros(starts.shape, np.int64)
    for k in moving:
        number = number * starts.shape[k] + where[k]
    even = bool(np.array_equal(starts, number * size))
    return tuple(names[k] for k in moving) if even else ()
