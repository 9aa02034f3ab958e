"""The ring of `ring_attention`: keys and values go round the devices of a mesh axis.

Each device keeps its queries. It sees one part of the keys after the other, calls the
kernel of `attention` on it, and merges the results through their LSE. In the backward
the parts go round once more, their gradients with them; every call of the backward
kernel gets the final out and LSE, so what it computes is this part's share of the
whole gradient. Nothing of the size of the whole sequence is ever on one device.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from . import _avals, _primitives, _reference, _vjp
from ._spec import AttentionSpec

AxisName = Hashable  # of a mesh axis; also a tuple of names
Arrays = dict[str, jax.Array]
# By axis, from the end: first index and size.
Window = dict[int, tuple[Any, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The static description of a ring.

    Attributes:
        spec: of the calls for one chunk of queries and one of keys.
        roles: the operands of the ring: those of `spec`, then sinks, min_distance and
            max_distance (bounds of `q_idx - kv_idx`) if there are any.
        axis_name, num_shards: the mesh axis.
        num_chunks: number of pieces of the sequence that a device has.
        is_compiled: calls run on the custom calls, not in plain JAX.
    """

    spec: AttentionSpec
    roles: tuple[str, ...]
    axis_name: AxisName
    num_shards: int
    num_chunks: int
    is_compiled: bool = False

    def chunk(self, device: Any, k: int) -> Any:
        """Which chunk of the sequence is the k-th of a device."""
        return device if k == 0 else 2 * self.num_shards - 1 - device

    def pass_on(self, tree: Any) -> Any:
        """Give to the next device, take from the one before."""
        n = self.num_shards
        steps = [(i, (i + 1) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, steps), tree)

    def chunk_lengths(self, operands: Arrays) -> tuple[int, int]:
        return (
            operands["query"].shape[-3] // self.num_chunks,
            operands["key"].shape[-3] // self.num_chunks,
        )

    def windows(
        self, operands: Arrays, a: int, c: int, me: Any, owner: Any
    ) -> dict[str, Window]:
        """Where query chunk `a` of this device and key chunk `c` of device `owner` are
        in the arrays that have them."""
        tq, tk = self.chunk_lengths(operands)
        rows, keys = (a * tq, tq), (c * tk, tk)
        first_key = self.chunk(owner, c) * tk
        block_q, block_kv = max(self.spec.block_q, 1), max(self.spec.block_kv, 1)
        return {
            "query": {-3: rows},
            "q_segment_ids": {-1: rows},
            "key": {-3: keys},
            "value": {-3: keys},
            "kv_segment_ids": {-1: keys},
            "bias": {-2: rows, -1: (first_key, tk)},
            "block_mask": {
                -2: (a * tq // block_q, tq // block_q),
                -1: (first_key // block_kv, tk // block_kv),
            },
            "out": {-3: rows},
            "lse": {-1: rows},
        }

    def part(
        self, operands: Arrays, held: Arrays, a: int, c: int, me: Any, owner: Any
    ) -> Arrays:
        """The operands of the call for query chunk `a` of this device and key chunk `c`
        of what it holds of device `owner`."""
        tq, tk = self.chunk_lengths(operands)
        windows = self.windows(operands, a, c, me, owner)
        first = {
            "q": self.chunk(me, a) * tq,
            "kv": self.chunk(owner, c) * tk,
        }
        part = {}
        for role in self.spec.operands:
            x = held.get(role, operands[role])
            side, _, what = role.partition("_")
            if what == "seq_lengths":
                x = jnp.maximum(x - first[side], 0)
            elif what == "offset":
                x = x + first[side]
            part[role] = _cut(x, windows.get(role, {}))
        return part

    def forward(self, part: Arrays) -> tuple[jax.Array, jax.Array]:
        run = _primitives.forward if self.is_compiled else _primitives.plain_forward
        return run(self.spec, self._in_order(part))

    def backward(
        self, part: Arrays, saved: Sequence[jax.Array], results: tuple[str, ...]
    ) -> Arrays:
        run = _primitives.backward if self.is_compiled else _primitives.plain_backward
        grads = run(self.spec, (*self._in_order(part), *saved), results)
        return dict(zip(results, grads, strict=True))

    def _in_order(self, part: Arrays) -> tuple[jax.Array, ...]:
        return tuple(part[role] for role in self.spec.operands)

    def pairs(self) -> list[tuple[int, int]]:
        chunks = range(self.num_chunks)
        return [(a, c) for a in chunks for c in chunks]


@functools.lru_cache(maxsize=4096)
def attention(ring: Ring) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `(*operands) -> (out, lse)`; the same function for an equal ring."""

    @jax.custom_vjp
    def fkl_ring_attention(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _forward(ring, dict(zip(ring.roles, operands, strict=True)))

    def fwd(*inputs: Any) -> Any:
        operands = tuple(x.value for x in inputs)
        out, lse = _forward(ring, dict(zip(ring.roles, operands, strict=True)))
        out, lse = checkpoint_name(out, "fkl_out"), checkpoint_name(lse, "fkl_lse")
        asked = _vjp.as_residual([x.perturbed for x in inputs])
        return (out, lse), (operands, out, lse, asked)

    def bwd(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        operands, out, lse, asked = saved
        flags = _vjp.of_residual(asked, len(operands))
        dout, dlse = map(_vjp.instantiate, cotangents)
        wanted = [
            role
            for role, x, a in zip(ring.roles, operands, flags, strict=True)
            if a and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        named = dict(zip(ring.roles, operands, strict=True))
        grads = _gradients(ring, named, out, lse, dout, dlse, wanted)
        return tuple(grads.get(role) for role in ring.roles)

    fkl_ring_attention.defvjp(fwd, bwd, symbolic_zeros=True)
    return jax.jit(fkl_ring_attention)


# --- private -------------------------------------------------------------------------

# What goes round, if the call has it.
_TRAVELLING = ("key", "value", "kv_segment_ids")


def _forward(ring: Ring, operands: Arrays) -> tuple[jax.Array, jax.Array]:
    axes = _avals.varying_axes(operands.values())
    me = lax.axis_index(ring.axis_name)
    n = ring.num_shards

    def step(t: Any, states: list[Any], held: Arrays) -> list[Any]:
        states = list(states)
        owner = (me - t) % n
        for a, c in ring.pairs():
            part = ring.part(operands, held, a, c, me, owner)

            def compute(part: Arrays, state: Any) -> Any:
                return _merge(state, ring.forward(part))

            states[a] = _if_live(ring, operands, part, compute, states[a])
        return states

    def body(t: Any, carry: Any) -> Any:
        states, held = carry
        # What the next step needs travels while this one computes.
        arriving = ring.pass_on(held)
        return step(t, states, held), arriving

    states = [
        _vary_all(_start(ring, operands, a, me), axes) for a in range(ring.num_chunks)
    ]
    held = {role: operands[role] for role in _TRAVELLING if role in operands}
    states, held = lax.fori_loop(np.int32(0), np.int32(n - 1), body, (states, held))
    states = step(n - 1, states, held)
    out = jnp.concatenate([acc for acc, _ in states], axis=-3)
    lse = jnp.concatenate([lse for _, lse in states], axis=-1)
    return out.astype(operands["query"].dtype), lse


def _start(
    ring: Ring, operands: Arrays, a: int, me: Any
) -> tuple[jax.Array, jax.Array]:
    """Out and lse before any key: the sink is counted here, once."""
    query, head_dim = operands["query"], operands["value"].shape[-1]
    tq, _ = ring.chunk_lengths(operands)
    # Of the query, so that they are sharded as it is over other axes of the mesh.
    zeros = jnp.zeros_like(
        query[..., a * tq : (a + 1) * tq, :, 0],
        dtype=_reference.gradient_dtype(query.dtype),
    )
    acc = jnp.broadcast_to(zeros[..., None], (*zeros.shape, head_dim))
    lse = jnp.swapaxes(zeros, -1, -2)
    if "sinks" not in operands:
        lse = jnp.full_like(lse, -jnp.inf)
    else:
        lse = lse + jnp.expand_dims(operands["sinks"], (*range(lse.ndim - 2), -1))
        if "q_seq_lengths" in operands:
            row = ring.chunk(me, a) * tq + jnp.arange(tq, dtype=jnp.int32)
            is_row = row < operands["q_seq_lengths"][..., None]
            lse = jnp.where(is_row[..., None, :], lse, -jnp.inf)
    return acc, lse


def _merge(
    state: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Out and lse over the keys of both; of no key at all, 0 and -inf."""
    (acc, lse), (out, part_lse) = state, part
    row_max = jnp.maximum(lse, part_lse)
    shift = jnp.where(row_max == -jnp.inf, 0, row_max)
    old, new = jnp.exp(lse - shift), jnp.exp(part_lse - shift)
    total = old + new
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1, total)

    def weight(x: jax.Array) -> jax.Array:  # (*B, T, N, 1)
        return jnp.swapaxes(x / safe_total, -1, -2)[..., None]

    merged = weight(old) * acc + weight(new) * out.astype(acc.dtype)
    return merged, jnp.where(is_empty, -jnp.inf, shift + jnp.log(safe_total))


def _gradients(
    ring: Ring,
    operands: Arrays,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    wanted: Sequence[str],
) -> Arrays:
    """The gradients of the wanted roles, in their operands' dtypes."""
    axes = _avals.varying_axes(operands.values())
    out, lse, dout, dlse = _vary_all((out, lse, dout, dlse), axes)
    me = lax.axis_index(ring.axis_name)
    n = ring.num_shards
    results = tuple(
        role
        for role in wanted
        if role != "sinks" and not _vjp.is_mask_capture(ring.spec, role)
    )

    def step(t: Any, grads: Arrays, held: Arrays) -> Arrays:
        owner = (me - t) % n
        for a, c in ring.pairs():
            part = ring.part(operands, held, a, c, me, owner)
            windows = ring.windows(operands, a, c, me, owner)
            saved = [
                _cut(x, windows[role])
                for role, x in zip(
                    ("out", "lse", "out", "lse"), (out, lse, dout, dlse), strict=True
                )
            ]

            def compute(
                part: Arrays,
                grads: Arrays,
                saved: list[jax.Array] = saved,
                windows: dict[str, Window] = windows,
            ) -> Arrays:
                own = ring.backward(part, saved, results)
                return {
                    role: _add_at(grads[role], own[role], windows.get(role, {}))
                    for role in results
                }

            grads = _if_live(ring, operands, part, compute, grads)
        return grads

    def send_moving(grads: Arrays) -> Arrays:
        moving = {role: grads[role] for role in results if role in _TRAVELLING}
        return grads | ring.pass_on(moving)

    def body(t: Any, carry: Any) -> Any:
        grads, held = carry
        arriving = ring.pass_on(held)
        return step(t, send_moving(grads), held), arriving

    grads: Arrays = {}
    if results:
        zeros = {
            role: jnp.zeros_like(
                operands[role],
                dtype=_reference.gradient_dtype(operands["query"].dtype),
            )
            for role in results
        }
        held = {role: operands[role] for role in _TRAVELLING if role in operands}
        # The first of the loop's sends carries zeros, in exchange for one body.
        grads, held = lax.fori_loop(
            np.int32(0), np.int32(n - 1), body, (_vary_all(zeros, axes), held)
        )
        # The gradients of a part have been to all devices: one more step is home.
        grads = send_moving(step(n - 1, send_moving(grads), held))
    if "sinks" in wanted:
        grads["sinks"] = _vjp.sinks_gradient(operands["sinks"], out, lse, dout, dlse)
    for role in wanted:
        if role not in grads:
            grads[role] = _avals.vary(jnp.zeros_like(operands[role]), axes)
    return {role: grads[role].astype(operands[role].dtype) for role in wanted}


def _vary_all(tree: Any, axes: frozenset[Any]) -> Any:
    return jax.tree.map(lambda x: _avals.vary(x, axes), tree)


def _cut(x: jax.Array, window: Window) -> jax.Array:
    """What is inside a window; an axis of size 1 is the same for all and stays."""
    for axis, (start, size) in window.items():
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def _add_at(total: jax.Array, x: jax.Array, window: Window) -> jax.Array:
    """`total` with `x` added inside a window."""
    x = x.astype(total.dtype)
    starts: list[Any] = [np.int32(0)] * total.ndim
    for axis, (start, _) in window.items():
        if total.shape[axis] != 1:
            starts[axis] = jnp.asarray(start, jnp.int32)
    old = lax.dynamic_slice(total, starts, x.shape)
    return lax.dynamic_update_slice(total, old + x, starts)


def _if_live(
    ring: Ring,
    operands: Arrays,
    part: Arrays,
    compute: Callable[[Arrays, Any], Any],
    state: Any,
) -> Any:
    """`compute(part, state)`, or `state` if no element of the part is live.

    The devices decide for themselves; no collective may be in `compute`.
    """
    is_live = _may_be_live(ring, operands, part)
    if is_live is None:
        return compute(part, state)
    return lax.cond(is_live, compute, lambda _, state: state, part, state)


def _may_be_live(ring: Ring, operands: Arrays, part: Arrays) -> jax.Array | None:
    """False only if no element of a part is live; None if nothing says so."""
    conditions = []  # (*B)
    num_q = jnp.int32(part["query"].shape[-3])
    num_kv = jnp.int32(part["key"].shape[-3])
    if "q_seq_lengths" in part:
        num_q = jnp.minimum(num_q, part["q_seq_lengths"])
        conditions.append(num_q > 0)
    if "kv_seq_lengths" in part:
        num_kv = jnp.minimum(num_kv, part["kv_seq_lengths"])
        conditions.append(num_kv > 0)
    first_distance = part["q_offset"] - part["kv_offset"]
    if "max_distance" in operands:
        smallest = first_distance - (num_kv - 1)
        conditions.append(smallest <= operands["max_distance"])
    if "min_distance" in operands:
        largest = first_distance + (num_q - 1)
        conditions.append(largest >= operands["min_distance"])
    if "q_segment_ids" in part:
        q_low, q_high = _range_of_ids(part["q_segment_ids"])
        kv_low, kv_high = _range_of_ids(part["kv_segment_ids"])
        conditions.append((q_low <= kv_high) & (kv_low <= q_high))
    is_live = None
    if conditions:
        is_live = functools.reduce(jnp.logical_and, conditions).any()
    if "block_mask" in part:
        has_block = (part["block_mask"] != 0).any()
        is_live = has_block if is_live is None else is_live & has_block
    return is_live


def _range_of_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest and largest id that is not padding; a range of none is empty."""
    most = np.iinfo(np.int32).max
    low = jnp.where(ids < 0, most, ids).min(-1, initial=most)
    return low, ids.max(-1, initial=-1)
