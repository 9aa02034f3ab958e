"""A drop-in for `jax.nn.dot_product_attention` on top of `attention`."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import _validate
from ._api import attention
from ._mask_mods import DenseMask, MaskMod, SlidingWindow


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["ffi", "xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention with exactly the signature of `jax.nn.dot_product_attention`.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H).
        value: (B, S, K, H) or (S, K, H).
        bias: float, broadcastable to (B, N, T, S).
        mask: bool, broadcastable to (B, N, T, S); True = attend.
        scale: default `1 / sqrt(H)`.
        is_causal: live iff `j <= i`.
        query_seq_lengths, key_value_seq_lengths: int (B,).
        local_window_size: int w for (w, w), or (left, right).
        implementation: None, "ffi" or "xla" as for `attention`; "cudnn" raises, there
            is no cuDNN in here.
        return_residual: also return the log-sum-exp, (B, T, N) as jax.nn has it.

    Returns:
        out of query's shape (value's head dim) and dtype; with `return_residual` also
        lse (B, T, N) or (T, N).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.

    Notes:
        Two differences from jax.nn, on purpose: rows without a live key give 0
        (jax.nn: the mean of all values), and the log-sum-exp is float32 and
        differentiable.
    """
    if implementation == "cudnn":
        raise NotImplementedError(
            "dot_product_attention: implementation is 'cudnn'; fkl_jax runs its own "
            "kernels. Pass None, 'ffi' or 'xla', "
            "or call jax.nn.dot_product_attention."
        )
    query = _validate.as_array(query, "query")
    if query.ndim not in (3, 4):
        raise ValueError(
            f"attention: query has shape {query.shape}; it must be (B, T, N, H) or "
            "(T, N, H)."
        )
    masks: list[MaskMod] = []
    if mask is not None:
        array = _validate.as_array(mask, "mask")
        if array.dtype != jnp.bool_:
            raise TypeError(
                f"attention: mask has dtype {array.dtype}; it must be bool (True = "
                "attend)."
            )
        masks.append(DenseMask(_four_axes(array, query, key)))
    if local_window_size is not None:
        window = local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        masks.append(SlidingWindow(left, right))
    if query.ndim == 3:
        query_seq_lengths = _unbatched(query_seq_lengths)
        key_value_seq_lengths = _unbatched(key_value_seq_lengths)
        bias = None if bias is None else _drop_batch(_validate.as_array(bias, "bias"))
    out = attention(
        query,
        key,
        value,
        bias=bias,
        mask_mod=masks,
        causal="top_left" if is_causal else False,
        scale=scale,
        implementation=implementation,
        return_lse=return_residual,
        q_seq_lengths=query_seq_lengths,
        kv_seq_lengths=key_value_seq_lengths,
    )
    if return_residual:
        return out[0], jnp.swapaxes(out[1], -1, -2)
    return out


# --- private -------------------------------------------------------------------------


def _four_axes(mask: jax.Array, query: jax.Array, key: Any) -> jax.Array:
    """The mask with four axes, each of B, N, T, S full or 1."""
    t, s = query.shape[-3], jnp.shape(key)[-3]
    batch = query.shape[0] if query.ndim == 4 else 1
    shape = (batch, query.shape[-2], t, s)
    fits = mask.ndim <= 4 and all(
        a in (1, b) for a, b in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"attention: mask has shape {mask.shape}; it must broadcast to (B, N, T, "
            f"S) = {shape}."
        )
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _unbatched(lengths: ArrayLike | None) -> ArrayLike | None:
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    return array[0] if array.shape == (1,) else array


def _drop_batch(bias: jax.Array) -> jax.Array:
    return bias[0] if bias.ndim == 4 and bias.shape[0] == 1 else bias
