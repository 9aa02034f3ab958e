"""What the layers of `fkl_jax.flax` and `fkl_jax.equinox` share: mods, rotary positions
and the key/value cache."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _compose
from ._api import attention
from ._mask_mods import DenseMask, MaskMod, SlidingWindow
from ._score_mods import ScoreMod, SoftCap

Mods = tuple[tuple[ScoreMod, ...], tuple[MaskMod, ...]]
Window = int | tuple[int | None, int | None] | None


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rotary: bool) -> None:
    """Raise ValueError unless a grouped-query layer can have these sizes."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"GroupedQueryAttention: num_heads is {num_heads}, num_kv_heads is "
            f"{num_kv_heads}; num_heads must be a positive multiple of num_kv_heads."
        )
    if head_dim < 1 or (rotary and head_dim % 2):
        raise ValueError(
            f"GroupedQueryAttention: head_dim is {head_dim}; rotary positions turn "
            "pairs, so it must be even and positive (rope_base=None does without)."
        )


def split_head_dim(features: int, num_heads: int) -> int:
    """The head dim when only the model's width is given."""
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"GroupedQueryAttention: {features} features do not split into "
            f"{num_heads} heads; pass head_dim."
        )
    return features // num_heads


def own_mods(score_mod: Any, mask_mod: Any) -> Mods:
    """Mods given to a layer, as two tuples of pytrees."""
    scores, masks = _compose.split_mods(score_mod, mask_mod)
    return tuple(scores), tuple(masks)


def limits(window: Window, soft_cap: float | None) -> Mods:
    """The mods of the arguments `window` and `soft_cap`."""
    scores = () if soft_cap is None else (SoftCap(soft_cap),)
    if window is None:
        return scores, ()
    if isinstance(window, tuple):
        return scores, (SlidingWindow(*window),)
    return scores, (SlidingWindow.last(window),)


def joined(*mods: Mods) -> dict[str, Sequence[Any]]:
    """Mods from left to right, as arguments of `attention`."""
    return {
        "score_mod": tuple(m for scores, _ in mods for m in scores),
        "mask_mod": tuple(m for _, masks in mods for m in masks),
    }


def broadcast_mask(mask: Any, query: jax.Array, kv_seq_len: int, where: str) -> Any:
    """A `DenseMask` of an array that broadcasts to (*B, N, T, S); non-zero = attend.

    The axes of heads, queries and keys stay as they are; batch axes are folded into
    one, which needs a full copy only if some but not all of them are 1.
    """
    array = jnp.asarray(mask)
    *batch, t, n, _ = query.shape
    shape = (*batch, n, t, kv_seq_len)
    fits = array.ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{where}: mask has shape {array.shape}; it must broadcast to (*batch, "
            f"heads, q_length, kv_length) = {shape}."
        )
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape) != 0
    if any(a != 1 for a in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return DenseMask(array.reshape(-1, *array.shape[-3:]))


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Turn the pair (x[d], x[d + H/2]) by `positions * base**(-2d / H)`.

    Args:
        x: (*B, T, N, H), H even.
        positions: (*B, T) or (T,), any number.
        base: of the geometric series of wavelengths.

    Source: Su et al., "RoFormer" (2021).
    """
    half = x.shape[-1] // 2
    acc = jnp.promote_types(x.dtype, jnp.float32)  # 16-bit angles lose their position
    frequency = base ** (-jnp.arange(half, dtype=acc) / half)
    angle = positions[..., None, None].astype(acc) * frequency  # (*B, T, 1, H/2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(acc), x[..., half:].astype(acc)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def append(cache: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    """The cache (*B, S, K, H) with rows (*B, T, K, H) written from index (*B,) on; rows
    beyond its end are dropped, never moved."""

    def write(cache: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
        slots = index + jnp.arange(rows.shape[0], dtype=index.dtype)
        return cache.at[slots].set(
            rows.astype(cache.dtype),
            mode="drop",
            indices_are_sorted=True,
            unique_indices=True,
        )

    for _ in range(index.ndim):
        write = jax.vmap(write)
    return write(cache, rows, index)


def check_room(index: jax.Array, count: Any, max_length: int, where: str) -> None:
    """Raise ValueError if tokens are known not to fit into the cache."""
    traced = isinstance(index, jax.core.Tracer) or isinstance(count, jax.core.Tracer)
    if not traced and bool(jnp.any(index + count > max_length)):
        raise ValueError(
            f"{where}: the cache holds {max_length} tokens, {index} are in it and "
            f"{count} more were given; make it longer with init_cache."
        )


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    index: jax.Array,
    lengths: Any,
    **options: Any,
) -> Any:
    """Attention of T new queries over a cache that has their keys in it.

    Args:
        query: (*B, T, N, H), at positions `index`, `index + 1`, ...
        key, value: (*B, S, K, H), the cache with the new rows in it.
        index: int32 (*B,), tokens in the cache before these.
        lengths: int32 (*B,), how many of the T count, the others give 0; None is all.
        options: of `attention`.

    Returns:
        out (*B, T, N, Hv); NaN where the cache is too short, since that is known
        only when it runs.
    """
    dtype = jnp.result_type(query, key, value)
    total = index + (query.shape[-3] if lengths is None else lengths)
    out = attention(
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        q_offset=index,
        q_seq_lengths=lengths,
        kv_seq_lengths=total,
        **options,
    )
    fits = (total <= key.shape[-3])[..., None, None, None]
    return jnp.where(fits, out, jnp.nan).astype(query.dtype)
