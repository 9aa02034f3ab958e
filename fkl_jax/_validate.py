"""Checks of the arguments; the error texts of `attention` live here.

Each message names the argument, what it was, what is allowed and what to do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATIONS = (None, "ffi", "xla")
CAUSAL = (False, True, "top_left", "bottom_right")
# As numpy's: comparing with JAX's scalar types is slow.
FLOATS = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)))


def as_array(x: Any, name: str) -> jax.Array:
    """Return an array, or raise a sentence."""
    if isinstance(x, jax.Array):
        return x
    if x is None or isinstance(x, str | bytes | dict):
        raise TypeError(f"attention: {name} is {x!r}; it must be an array.")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"attention: {name} is a {type(x).__name__} that is no array ({e}); pass "
            "a jax.Array."
        ) from None


def check_qkv(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Check the three arrays against each other."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(
                f"attention: {name} has shape {x.shape}; it must be (*batch, length, "
                "heads, head_dim), "
                "at least 3 axes."
            )
        if x.dtype not in FLOATS:
            raise TypeError(
                f"attention: {name} has dtype {x.dtype}; it must be float32, "
                "bfloat16, float16 or float64."
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"attention: query, key and value have dtypes {query.dtype}, {key.dtype} "
            f"and {value.dtype}; they must be "
            "the same, cast two of them."
        )
    batch = query.shape[:-3]
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim:
            raise ValueError(
                f"attention: {name} has {x.ndim} axes, query has {query.ndim}; they "
                "must match "
                f"(query {query.shape}, {name} {x.shape})."
            )
        if x.shape[:-3] != batch:
            raise ValueError(
                f"attention: {name} has batch axes {x.shape[:-3]}, query has {batch}; "
                "they must match."
            )
    if key.shape[-3:-1] != value.shape[-3:-1]:
        raise ValueError(
            f"attention: key has (length, heads) {key.shape[-3:-1]}, value has "
            f"{value.shape[-3:-1]}; they must match."
        )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"attention: key has head_dim {key.shape[-1]}, query has "
            f"{query.shape[-1]}; they must match."
        )
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] == 0:
            raise ValueError(
                f"attention: {name} has head_dim 0; it must be at least 1."
            )
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"attention: query has {heads} heads, key and value have {kv_heads}; the "
            "number of query heads must be a "
            "positive multiple of the number of key/value heads."
        )


def check_bias(bias: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return bias with `len(shape)` axes, each full or 1."""
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        hint = (
            " (a bool mask goes to mask_mod=DenseMask(...))"
            if bias.dtype == jnp.bool_
            else ""
        )
        raise TypeError(
            f"attention: bias has dtype {bias.dtype}; it must be a float{hint}."
        )
    fits = bias.ndim <= len(shape) and all(
        a in (1, b) for a, b in zip(bias.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attention: bias has shape {bias.shape}; it must broadcast to (*batch, "
            f"heads, q_length, kv_length) = {shape}."
        )
    return bias.reshape((1,) * (len(shape) - bias.ndim) + bias.shape)


def check_lengths(x: Any, name: str, batch: tuple[int, ...]) -> jax.Array:
    """Return int32 lengths of shape `batch`."""
    return to_int32(check_integers(x, name, batch))


def check_segment_ids(
    q_ids: Any, kv_ids: Any, batch: tuple[int, ...], t: int, s: int
) -> tuple[jax.Array, jax.Array]:
    """Return int32 segment ids of shapes (*batch, t) and (*batch, s)."""
    return segment_ids_to_int32(
        check_integers(q_ids, "q_segment_ids", (*batch, t)),
        check_integers(kv_ids, "kv_segment_ids", (*batch, s)),
    )


def check_fits_int32(x: Any, name: str) -> None:
    """Raise ValueError if a Python or numpy integer is beyond int32; JAX would wrap
    it."""
    if isinstance(x, jax.Array) or np.asarray(x).dtype.kind not in "iu":
        return
    info, values = np.iinfo(np.int32), np.asarray(x)
    for value in (values.min(initial=0), values.max(initial=0)):
        if not info.min <= value <= info.max:
            raise ValueError(
                f"attention: {name} has the value {value}; it must fit int32, be "
                f"between {info.min} and {info.max}."
            )


def check_integers(x: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Return the integers, of shape `shape`, as they are."""
    array = _integer_array(x, name)
    if array.shape != shape:
        raise ValueError(
            f"attention: {name} has shape {array.shape}; it must be {shape}."
        )
    return array


def _integer_array(x: Any, name: str) -> jax.Array:
    check_fits_int32(x, name)
    array = as_array(x, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"attention: {name} has dtype {array.dtype}; it must be an integer."
        )
    return array


def check_offset(x: Any, name: str, batch: tuple[int, ...]) -> jax.Array:
    """Return an int32 offset of shape `batch`; a scalar is the same for all."""
    array = _integer_array(x, name)
    if array.shape not in ((), batch):
        raise ValueError(
            f"attention: {name} has shape {array.shape}; it must be a scalar or have "
            f"the batch shape {batch}."
        )
    return jnp.broadcast_to(to_int32(array), batch)


def check_scale(scale: Any, dtype: Any) -> jax.Array:
    """Return the scale as a float scalar."""
    if isinstance(scale, bool | str):
        raise TypeError(
            f"attention: scale is {scale!r}; it must be a number or a float scalar."
        )
    array = as_array(scale, "scale")
    if array.shape != ():
        raise ValueError(
            f"attention: scale has shape {array.shape}; it must be a scalar."
        )
    if array.dtype == jnp.bool_ or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"attention: scale has dtype {array.dtype}; it must be real.")
    if not isinstance(scale, jax.Array) and not np.isfinite(scale):
        raise ValueError(f"attention: scale is {scale}; it must be finite.")
    return array.astype(dtype)


def check_sinks(sinks: Any, heads: int, dtype: Any) -> jax.Array:
    """Return the sinks as floats of shape (N,)."""
    array = as_array(sinks, "sinks")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"attention: sinks has dtype {array.dtype}; it must be a float."
        )
    if array.shape != (heads,):
        raise ValueError(
            f"attention: sinks has shape {array.shape}; it must be ({heads},), one "
            "logit per query head."
        )
    return array.astype(dtype)


def check_block_mask(
    mask: jax.Array,
    blocks: tuple[int, int],
    batch: tuple[int, ...],
    heads: int,
    t: int,
    s: int,
) -> jax.Array:
    """Return the block mask as (*B or 1s, N|1, nQB, nKB) uint8."""
    size = int(np.prod(batch))
    tiles = (-(-t // blocks[0]), -(-s // blocks[1]))
    lead = mask.shape[:-2]
    fits = (
        lead == (size * heads,)
        if mask.ndim == 3
        else lead[0] in (1, size) and lead[1] in (1, heads)
    )
    if mask.shape[-2:] != tiles or not fits:
        raise ValueError(
            f"attention: block_mask has shape {mask.shape}; for q_length {t}, "
            f"kv_length {s} and blocks of "
            f"{blocks[0]} x {blocks[1]} it must be ({size * heads}, {tiles[0]}, "
            f"{tiles[1]}) or "
            f"({size}|1, {heads}|1, {tiles[0]}, {tiles[1]})."
        )
    if mask.ndim == 3:
        mask = mask.reshape(*batch, heads, *tiles)
    elif lead[0] == size and size != 1:
        mask = mask.reshape(*batch, *mask.shape[1:])
    else:
        mask = mask.reshape(*(1 for _ in batch), *mask.shape[1:])
    return mask.astype(jnp.uint8)


def check_choice(value: Any, name: str, allowed: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `allowed`, types included (1 is not True)."""
    if not any(type(value) is type(a) and value == a for a in allowed):
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"attention: {name} is {value!r}; it must be one of {words}.")


def check_bool(value: Any, name: str) -> None:
    """Raise unless `value` is a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"attention: {name} is {value!r}; it must be True or False.")


def ambiguous_causal(t: int, s: int) -> ValueError:
    """The error for causal=True with different lengths."""
    return ValueError(
        f"attention: causal=True with q_length {t} and kv_length {s} is ambiguous. "
        "Say causal='top_left' "
        "(query i sees keys j <= i, as jax.nn) or causal='bottom_right' (j <= i + "
        "kv_length - q_length, as "
        "FlashAttention), or pass q_offset."
    )


def causal_with_offsets(causal: str) -> ValueError:
    """The error for a named alignment together with explicit offsets."""
    return ValueError(
        f"attention: causal={causal!r} and q_offset/kv_offset both say where the "
        "diagonal is. Pass causal=True with the "
        "offsets (live iff kv_idx <= q_idx), or the name alone."
    )


def half_of_segment_ids(query_is_missing: bool) -> ValueError:
    """The error for segment ids of one side only."""
    names = ("q_segment_ids", "kv_segment_ids")
    present, absent = names[::-1] if query_is_missing else names
    return ValueError(f"attention: {present} is given without {absent}; pass both.")


def segment_ids_to_int32(
    q_ids: jax.Array, kv_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return int32 ids that are equal and negative where these are."""
    if all(x.dtype.itemsize < 4 or x.dtype == jnp.int32 for x in (q_ids, kv_ids)):
        return q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
    # Wider ones, hashes for example, become their ranks among all ids of the call.
    dtype = jnp.promote_types(q_ids.dtype, kv_ids.dtype)
    if not jnp.issubdtype(dtype, jnp.integer):  # int64 beside uint64
        dtype = jnp.uint64
    negative = [x < 0 for x in (q_ids, kv_ids)]
    ids = [x.astype(dtype) for x in (q_ids, kv_ids)]
    every = jnp.sort(jnp.concatenate([x.ravel() for x in ids]))
    ranks = [jnp.searchsorted(every, x).astype(jnp.int32) for x in ids]
    q_ranks, kv_ranks = map(jnp.where, negative, (-1, -1), ranks)
    return q_ranks, kv_ranks


def to_int32(x: jax.Array) -> jax.Array:
    """Return int32, saturated: a 64-bit length beyond any array must not wrap to a
    negative one."""
    if x.dtype == jnp.int32:
        return x
    if x.dtype.itemsize >= 4:
        info = np.iinfo(np.int32)
        low = 0 if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else info.min
        x = jnp.clip(x, low, info.max)
    return x.astype(jnp.int32)
