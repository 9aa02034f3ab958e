"""BlockMask: a coarse mask over tiles whose contents are traced and whose geometry is
static."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from . import _validate
from ._compose import checked_mask
from ._mask_mods import Causal, MaskMod, SlidingWindow, as_mask_mod


@jax.tree_util.register_pytree_node_class
class BlockMask:
    """Which tiles of the score matrix are attended.

    Every element of an attended block is live unless another mask source says no; a
    dead block costs neither loads nor arithmetic. The array is traced: new contents
    never compile anything.

    Args:
        mask: bool or uint8, 1 = attend, shape (batch*heads, nQB, nKB) or (B|1, N|1,
            nQB, nKB), with nQB = ceil(T / block_q) and nKB = ceil(S / block_kv).
        block_q: queries per block, any positive int, default 128.
        block_kv: keys per block, any positive int, default 128.

    Raises:
        ValueError: a wrong number of axes, or a block size that is not positive.
        TypeError: a dtype other than bool and uint8.

    Example:
        >>> window = BlockMask.sliding_window(4096, 4096, left=1023)
        >>> out = attention(q, k, v, block_mask=window)
    """

    def __init__(self, mask: ArrayLike, block_q: int = 128, block_kv: int = 128):
        array = mask if isinstance(mask, jax.Array) else jnp.asarray(np.asarray(mask))
        if array.dtype not in (jnp.bool_, jnp.uint8):
            raise TypeError(
                f"attention: mask of BlockMask has dtype {array.dtype}; it must be "
                "bool or uint8 (1 = attend)."
            )
        if array.ndim not in (3, 4):
            raise ValueError(
                f"attention: mask of BlockMask has shape {array.shape}; it must be "
                "(batch*heads, nQB, nKB) or "
                "(B|1, N|1, nQB, nKB)."
            )
        self.mask = array
        self.block_q = _block_size(block_q, "block_q")
        self.block_kv = _block_size(block_kv, "block_kv")

    def tree_flatten(self) -> tuple[tuple[Any], tuple[int, int]]:
        return (self.mask,), (self.block_q, self.block_kv)

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, int], children: Any) -> "BlockMask":
        mask = object.__new__(cls)
        (mask.mask,) = children
        mask.block_q, mask.block_kv = sizes
        return mask

    @classmethod
    def causal(
        cls, q_len: int, kv_len: int, *, block_q: int = 128, block_kv: int = 128
    ) -> "BlockMask":
        """Blocks with any element `kv_idx <= q_idx`. Exact causality inside them needs
        `causal` or `Causal()` too."""
        return cls.from_mask_mod(
            Causal(), q_len, kv_len, block_q=block_q, block_kv=block_kv
        )

    @classmethod
    def sliding_window(
        cls,
        q_len: int,
        kv_len: int,
        left: ArrayLike | None,
        right: ArrayLike | None = 0,
        *,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> "BlockMask":
        """Blocks with any element of `SlidingWindow(left, right)`."""
        mod = SlidingWindow(left, right)
        return cls.from_mask_mod(mod, q_len, kv_len, block_q=block_q, block_kv=block_kv)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod | Callable[..., Any],
        q_len: int,
        kv_len: int,
        *,
        batch: int = 1,
        heads: int = 1,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> "BlockMask":
        """Blocks in which any element is live under a mask mod.

        Args:
            mask_mod: a MaskMod or a function (b, h, q_idx, kv_idx) -> bool.
            q_len, kv_len: T and S.
            batch, heads: B and N if the mask depends on them, else 1.
            block_q, block_kv: block sizes.
        """
        mod = as_mask_mod(mask_mod)
        mod.check_signature("mask_mod")
        q_len, kv_len = _size(q_len, "q_len"), _size(kv_len, "kv_len")
        batch, heads = _size(batch, "batch"), _size(heads, "heads")

        def one(*indices: Any) -> Any:
            return checked_mask(mod(*indices), mod)

        def live(b: Any, h: Any, q: Any, kv: Any) -> Any:
            over_kv = jax.vmap(one, (None, None, None, 0))
            over_q = jax.vmap(over_kv, (None, None, 0, None))
            over_h = jax.vmap(over_q, (None, 0, None, None))
            return jax.vmap(over_h, (0, None, None, None))(b, h, q, kv)

        b, h = jnp.arange(batch, dtype=jnp.int32), jnp.arange(heads, dtype=jnp.int32)

        def block(q0: jax.Array, kv0: jax.Array) -> jax.Array:
            q = q0 + jnp.arange(block_q, dtype=jnp.int32)
            kv = kv0 + jnp.arange(block_kv, dtype=jnp.int32)
            inside = (q < q_len)[:, None] & (kv < kv_len)[None, :]
            # Past the end the mod must not be asked: clamp, then drop.
            out = live(b, h, jnp.minimum(q, q_len - 1), jnp.minimum(kv, kv_len - 1))
            return (out & inside).any((-2, -1))

        return cls(
            _by_block(block, q_len, kv_len, block_q, block_kv, (batch, heads)),
            block_q,
            block_kv,
        )

    @classmethod
    def from_segment_ids(
        cls,
        q_ids: ArrayLike,
        kv_ids: ArrayLike | None = None,
        *,
        block_q: int = 128,
        block_kv: int = 128,
    ) -> "BlockMask":
        """Blocks that hold a query and a key of one segment.

        Args:
            q_ids: int (B, T); negative ids are padding.
            kv_ids: int (B, S); None means `q_ids`.
        """
        _validate.check_fits_int32(q_ids, "q_ids of BlockMask.from_segment_ids")
        _validate.check_fits_int32(kv_ids, "kv_ids of BlockMask.from_segment_ids")
        of_q = jnp.asarray(q_ids)
        of_kv = of_q if kv_ids is None else jnp.asarray(kv_ids)
        for name, ids in (("q_ids", of_q), ("kv_ids", of_kv)):
            is_int = jnp.issubdtype(ids.dtype, jnp.integer)
            if ids.ndim != 2 or not is_int:
                kind = ValueError if is_int else TypeError
                raise kind(
                    f"attention: {name} of BlockMask.from_segment_ids is "
                    f"{ids.dtype}{list(ids.shape)}; it must be int "
                    "with shape (B, length)."
                )
        if of_q.shape[0] != of_kv.shape[0]:
            raise ValueError(
                f"attention: q_ids has batch {of_q.shape[0]}, kv_ids "
                f"{of_kv.shape[0]}; they must match."
            )
        of_q, of_kv = _validate.segment_ids_to_int32(of_q, of_kv)
        q = _pad_to_blocks(of_q, 1, block_q, -1)
        kv = _pad_to_blocks(of_kv, 1, block_kv, -1)

        def block(q0: jax.Array, kv0: jax.Array) -> jax.Array:
            a = lax.dynamic_slice_in_dim(q, q0, block_q, 1)[:, :, None]
            b = lax.dynamic_slice_in_dim(kv, kv0, block_kv, 1)[:, None, :]
            return ((a == b) & (a >= 0)).any((-2, -1))[:, None]

        batch = of_q.shape[0]
        lengths = (of_q.shape[1], of_kv.shape[1])
        return cls(
            _by_block(block, *lengths, block_q, block_kv, (batch, 1)), block_q, block_kv
        )

    @classmethod
    def from_dense(
        cls, dense: ArrayLike, *, block_q: int = 128, block_kv: int = 128
    ) -> "BlockMask":
        """Blocks with any live element of a dense bool mask, shape (T, S), (N|1, T, S)
        or (B|1, N|1, T, S)."""
        array = jnp.asarray(dense)
        if array.dtype != jnp.bool_ or array.ndim not in (2, 3, 4):
            kind = ValueError if array.dtype == jnp.bool_ else TypeError
            raise kind(
                "attention: dense of BlockMask.from_dense is "
                f"{array.dtype}{list(array.shape)}; it must be bool with "
                "shape (T, S), (N|1, T, S) or (B|1, N|1, T, S)."
            )
        array = array.reshape((1,) * (4 - array.ndim) + array.shape)
        _block_size(block_q, "block_q"), _block_size(block_kv, "block_kv")
        array = _pad_to_blocks(array, 2, block_q, False)
        array = _pad_to_blocks(array, 3, block_kv, False)
        b, n, t, s = array.shape
        tiles = array.reshape(b, n, t // block_q, block_q, s // block_kv, block_kv)
        return cls(tiles.any((3, 5)), block_q, block_kv)

    def to_dense(self, q_len: int, kv_len: int) -> jax.Array:
        """Return the mask as bool, the leading axes kept, then (q_len, kv_len)."""
        rows = jnp.repeat(self.mask != 0, self.block_q, axis=-2)
        return jnp.repeat(rows, self.block_kv, axis=-1)[..., :q_len, :kv_len]

    def sparsity(self) -> float | jax.Array:
        """Return the fraction of dead blocks; a float unless the mask is traced."""
        if self.mask.size == 0:
            return 0.0
        dead = jnp.mean(self.mask == 0)
        return dead if isinstance(dead, jax.core.Tracer) else float(dead)

    def __repr__(self) -> str:
        shape = tuple(self.mask.shape) if hasattr(self.mask, "shape") else self.mask
        text = (
            f"BlockMask(shape={shape}, block_q={self.block_q}, block_kv={self.block_kv}"
        )
        if isinstance(self.mask, jax.Array) and not isinstance(
            self.mask, jax.core.Tracer
        ):
            text += f", sparsity={self.sparsity():.1%}"
        return text + ")"


def _block_size(value: int, name: str) -> int:
    size = _static_int(value, name)
    if size <= 0:
        raise ValueError(
            f"attention: {name} of BlockMask is {size}; it must be positive."
        )
    return size


def _size(value: int, name: str) -> int:
    size = _static_int(value, name)
    if size < 0:
        raise ValueError(
            f"attention: {name} of BlockMask is {size}; it must not be negative."
        )
    return size


def _static_int(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except (TypeError, jax.errors.TracerIntegerConversionError):
        raise TypeError(
            f"attention: {name} of BlockMask is {value!r}; it must be a Python int, "
            "since the geometry is static."
        ) from None


def _pad_to_blocks(x: jax.Array, axis: int, block: int, value: Any) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % _block_size(block, "block size"))
    return jnp.pad(x, widths, constant_values=value)


def _by_block(
    block: Callable[[jax.Array, jax.Array], jax.Array],
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
    leading: tuple[int, int],
) -> jax.Array:
    """Evaluate `block(q0, kv0) -> (*leading)` for every block, one at a time: no T x S
    array is made."""
    num_q = math.ceil(q_len / _block_size(block_q, "block_q"))
    num_kv = math.ceil(kv_len / _block_size(block_kv, "block_kv"))
    if num_q == 0 or num_kv == 0:
        return jnp.zeros((*leading, num_q, num_kv), jnp.bool_)
    q0 = jnp.arange(num_q, dtype=jnp.int32) * block_q
    kv0 = jnp.arange(num_kv, dtype=jnp.int32) * block_kv
    rows = lax.map(lambda q: lax.map(lambda kv: block(q, kv), kv0), q0)
    return jnp.moveaxis(rows, (0, 1), (2, 3))
