"""Attention over a sequence that is split over the devices of a mesh axis, inside
`jax.shard_map`: `ring_attention` and `ulysses_attention`.

The ring is in `_ring.py`. Ulysses is an all-to-all that exchanges the split of the
sequence for a split of the heads, and one back.
"""

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import _api, _avals, _backends, _ring, _validate, _vjp
from ._block_mask import BlockMask
from ._mask_mods import intersection
from ._ring import Arrays, AxisName, Ring
from ._spec import AttentionSpec


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    zigzag: bool = False,
    **options: Any,
) -> Any:
    """Compute `attention` over a sequence split over a mesh axis; keys and values go
    round the devices.

    To be called inside `jax.shard_map`. Letters: n devices along `axis_name`, each with
    T queries of n T and S keys of n S; the rest as for `attention`. Device i has part i
    of the sequence, or with `zigzag` the chunks i and 2n - 1 - i of 2n
    (`zigzag_permute`). The result is this device's part of what `attention` gives for
    the whole arrays: `q_idx` and `kv_idx` of mods, `causal` and its alignments,
    lengths and offsets mean positions in the whole sequence. `b` and `h` count what
    the device has.

    Args:
        query: (*B, T, N, H), the queries of this device.
        key, value: (*B, S, K, H) and (*B, S, K, Hv), its keys and values.
        axis_name: the mesh axis, or a tuple of axes, that splits the sequence.
        zigzag: the sequence is in zigzag order: each device has an early and a late
            chunk, so that under a causal mask all have the same work. T and S must
            then be even.
        options: every keyword of `attention`, with these meanings:
            q_segment_ids (*B, T) and kv_segment_ids (*B, S), those of the device;
            q_seq_lengths, kv_seq_lengths, q_offset, kv_offset, sinks and the parameters
            and captured arrays of mods, those of the whole sequence (an array that a
            mod reads at `q_idx` or `kv_idx` is whole and in the natural order);
            bias broadcastable to (*B, N, T, n S) and block_mask (B|1, N|1, nQB, nKB)
            with the rows of the device and the columns of all keys in the natural
            order; a bias whose last axis is split is refused.

    Returns:
        out (*B, T, N, Hv) in query's dtype; with `return_lse` also lse (*B, N, T).

    Raises:
        ValueError: `axis_name` is no axis of a surrounding shard_map; with `zigzag` an
            odd T or S; blocks of a block mask that do not divide the chunks;
            otherwise as `attention`.
        TypeError: a keyword that `attention` does not have; otherwise as `attention`.
        NotImplementedError: as `attention`.

    Notes:
        n - 1 steps send key and value on (`ppermute`), each beside the kernels of the
        step before; the backward sends their gradients too, in float32. Steps without
        a live element, as causal masks, windows (built-in mask mods), lengths, segment
        ids and block masks show, call no kernel; under a vmap over one of those
        operands they do. Memory on a device is O(T + S), the residuals being its own
        operands, out and lse, under the checkpoint names "fkl_out" and "fkl_lse".
        Gradients are exact, for the LSE and the parameters of mods too, in reverse
        mode; further derivatives are those of the plain JAX version, and not sparing
        with memory. In a shard_map with `check_vma=False`, a gradient taken inside of
        it with respect to something that is the same on all devices is this device's
        share, to be summed by the caller. On an axis of size 1 this is `attention`.

    Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); the zigzag
        order as in Llama 3's context parallelism.

    Example:
        >>> ring = functools.partial(ring_attention, axis_name="seq", causal=True)
        >>> spec = P(None, "seq")
        >>> jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v)
    """
    _check_options(options, "ring_attention")
    _validate.check_bool(zigzag, "zigzag")
    num_shards = _num_shards(axis_name, "ring_attention")
    if num_shards == 1:
        return _api.attention(query, key, value, **options)
    for name in ("q_segment_ids", "kv_segment_ids"):
        _check_ids_compare_across_devices(options.get(name), name)
    return_lse = options.pop("return_lse", False)
    implementation = options.pop("implementation", None)
    _validate.check_bool(return_lse, "return_lse")
    _validate.check_choice(implementation, "implementation", _validate.IMPLEMENTATIONS)
    call = _api.resolve(query, key, value, sequence_shards=num_shards, **options)

    implied = tuple(call.implied)
    made = _vjp.implied_operands(call.spec, implied, call.operands["query"])
    operands = call.operands | dict(zip(implied, made, strict=True))
    extra = {"sinks": operands.pop("sinks", None)}
    batch = operands["query"].shape[:-3]
    for role in ("q_offset", "kv_offset"):
        operands.setdefault(role, jnp.zeros(batch, jnp.int32))
    bounds = intersection([mask.distances() for mask in call.masks])
    extra["min_distance"], extra["max_distance"] = bounds
    spec = dataclasses.replace(call.spec, operands=tuple(operands))
    num_chunks = 2 if zigzag else 1
    _check_chunks(spec, operands, num_chunks)
    operands.update({role: x for role, x in extra.items() if x is not None})
    ring = Ring(
        spec=spec,
        roles=tuple(operands),
        axis_name=axis_name,
        num_shards=num_shards,
        num_chunks=num_chunks,
    )
    part = jax.eval_shape(lambda x: ring.part(x, x, 0, 0, 0, 0), operands)
    is_compiled = _backends.choose(spec, part, implementation) == "ffi"
    ring = dataclasses.replace(ring, is_compiled=is_compiled)
    # Everything varies over the axis from here on: the gradient of what is the same on
    # all devices is summed over them, once.
    axes = _avals.varying_axes([*operands.values(), lax.axis_index(axis_name)])
    out, lse = _ring.attention(ring)(*(_avals.vary(x, axes) for x in operands.values()))
    return (out, lse) if return_lse else out


def ulysses_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: AxisName,
    **options: Any,
) -> Any:
    """Compute `attention` over a sequence split over a mesh axis; an all-to-all gives
    each device all positions of its share of the heads.

    To be called inside `jax.shard_map`. Arguments, result and meaning are those of
    `ring_attention` without `zigzag`; `h` of mods counts all N heads.

    Args:
        query: (*B, T, N, H), the queries of this device; n must divide N.
        key, value: (*B, S, K, H) and (*B, S, K, Hv), its keys and values. If n does
            not divide K each head is sent to all the devices that read it.
        axis_name: the mesh axis, or a tuple of axes, that splits the sequence.
        options: every keyword of `attention`, with the meanings they have for
            `ring_attention`.

    Returns:
        out (*B, T, N, Hv) in query's dtype; with `return_lse` also lse (*B, N, T).

    Raises:
        ValueError: `axis_name` is no axis of a surrounding shard_map; n does not divide
            N; blocks of a block mask that do not divide T; otherwise as `attention`.
        TypeError, NotImplementedError: as `ring_attention`.

    Notes:
        Four all-to-alls forward, as many backward; one kernel. Memory on a device is
        O(T + S), as n T positions of N / n heads are as much as T positions of N
        heads. On an axis of size 1 this is `attention`.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """
    _check_options(options, "ulysses_attention")
    num_shards = _num_shards(axis_name, "ulysses_attention")
    if num_shards == 1:
        return _api.attention(query, key, value, **options)
    return_lse = options.pop("return_lse", False)
    implementation = options.pop("implementation", None)
    _validate.check_bool(return_lse, "return_lse")
    exchange = _Exchange(axis_name, num_shards)
    call = exchange.resolve(query, key, value, options)
    out, lse = _api.run(call, return_lse=True, implementation=implementation)
    out = exchange.to_rows(out, out.ndim - 2, out.ndim - 3)
    if not return_lse:
        return out
    return out, exchange.to_rows(lse, lse.ndim - 2, lse.ndim - 1)


# --- private -------------------------------------------------------------------------


def _check_ids_compare_across_devices(ids: Any, name: str) -> None:
    # `attention` ranks wider ids among those at hand, here only the device's own.
    dtype = getattr(ids, "dtype", np.dtype(np.int32))
    if dtype.itemsize >= 4 and dtype != np.int32:
        raise TypeError(
            f"ring_attention: {name} has dtype {dtype}; ids are compared across "
            "devices and must be int32 or narrower."
        )


@functools.cache
def _option_names() -> frozenset[str]:
    parameters = inspect.signature(_api.attention).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def _check_options(options: dict[str, Any], where: str) -> None:
    for name in options:
        if name not in _option_names():
            raise TypeError(
                f"{where} got an unexpected keyword argument {name!r}; it takes those "
                "of attention."
            )


def _num_shards(axis_name: AxisName, where: str) -> int:
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise ValueError(
            f"attention: axis_name {axis_name!r} is no axis of a surrounding "
            f"jax.shard_map; call {where} inside one whose mesh has that axis."
        ) from None


def _check_chunks(spec: AttentionSpec, operands: Arrays, num_chunks: int) -> None:
    lengths = {"query": operands["query"].shape[-3], "key": operands["key"].shape[-3]}
    for name, length in lengths.items():
        if length % num_chunks:
            raise ValueError(
                f"attention: {name} has length {length} on each device; with zigzag "
                "it is two chunks, so it must be even."
            )
    if "block_mask" in operands:
        for name, block, length in (
            ("block_q", spec.block_q, lengths["query"] // num_chunks),
            ("block_kv", spec.block_kv, lengths["key"] // num_chunks),
        ):
            if length % block:
                raise _blocks_across_parts(name, block, length)


def _blocks_across_parts(name: str, block: int, length: int) -> ValueError:
    return ValueError(
        f"attention: {name} of block_mask is {block}; it must divide {length}, the "
        "number of positions that a device has in a row."
    )


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The split of the sequence over a mesh axis in exchange for a split of the
    heads."""

    axis_name: AxisName
    num_shards: int

    def to_heads(self, x: jax.Array, heads_axis: int, rows_axis: int) -> jax.Array:
        return lax.all_to_all(x, self.axis_name, heads_axis, rows_axis, tiled=True)

    def to_rows(self, x: jax.Array, heads_axis: int, rows_axis: int) -> jax.Array:
        return lax.all_to_all(x, self.axis_name, rows_axis, heads_axis, tiled=True)

    def own_heads(self, x: jax.Array, axis: int) -> jax.Array:
        share = x.shape[axis] // self.num_shards
        first = lax.axis_index(self.axis_name) * share
        return lax.dynamic_slice_in_dim(x, first, share, axis)

    def all_rows(self, x: jax.Array, axis: int) -> jax.Array:
        return lax.all_gather(x, self.axis_name, axis=axis, tiled=True)

    def of_scores(self, x: jax.Array, num_rows: int) -> jax.Array:
        """An array over the scores, (..., N or 1, rows or 1, columns)."""
        heads, rows = x.ndim - 3, x.ndim - 2
        has_heads, has_rows = x.shape[heads] > 1, x.shape[rows] == num_rows
        if has_heads and has_rows:
            return self.to_heads(x, heads, rows)
        if has_heads:
            return self.own_heads(x, heads)
        return self.all_rows(x, rows) if has_rows else x

    def resolve(
        self, query: Any, key: Any, value: Any, options: dict[str, Any]
    ) -> _api.Call:
        """The call for all rows of this device's heads."""
        query = _validate.as_array(query, "query")
        key = _validate.as_array(key, "key")
        value = _validate.as_array(value, "value")
        _validate.check_qkv(query, key, value)
        n, batch, (t, heads) = self.num_shards, query.shape[:-3], query.shape[-3:-1]
        kv_heads, kv_len = key.shape[-2], n * key.shape[-3]
        if heads % n:
            raise ValueError(
                f"attention: query has {heads} heads, axis_name {self.axis_name!r} has "
                f"size {n}; ulysses_attention needs a number of query heads that the "
                "size divides, ring_attention does not."
            )
        if options.get("bias") is not None:
            bias = _validate.as_array(options["bias"], "bias")
            bias = _validate.check_bias(bias, (*batch, heads, t, kv_len))
            options["bias"] = self.of_scores(bias, t)
        blocks = options.get("block_mask")
        if isinstance(blocks, BlockMask):
            sizes = (blocks.block_q, blocks.block_kv)
            if t % blocks.block_q:
                raise _blocks_across_parts("block_q", blocks.block_q, t)
            mask = _validate.check_block_mask(
                blocks.mask, sizes, batch, heads, t, kv_len
            )
            mask = mask.reshape(-1, *mask.shape[-3:])
            mask = self.of_scores(mask, t // blocks.block_q)
            options["block_mask"] = BlockMask(mask, *sizes)
        if options.get("sinks") is not None:
            sinks = _validate.as_array(options["sinks"], "sinks")
            _validate.check_sinks(sinks, heads, sinks.dtype)
            options["sinks"] = self.own_heads(sinks, 0)
        for name, length in (
            ("q_segment_ids", t),
            ("kv_segment_ids", key.shape[-3]),
        ):
            if options.get(name) is not None:
                ids = _validate.check_integers(options[name], name, (*batch, length))
                options[name] = self.all_rows(ids, ids.ndim - 1)
        # A key/value head for each device at least, and the same number for each.
        copies = math.lcm(kv_heads, n) // kv_heads
        key, value = (
            jnp.repeat(x, copies, axis=-2) if copies > 1 else x for x in (key, value)
        )
        return _api.resolve(
            *(self.to_heads(x, x.ndim - 2, x.ndim - 3) for x in (query, key, value)),
            head_shards=n,
            first_head=lax.axis_index(self.axis_name) * (heads // n),
            **options,
        )
