"""The zigzag order of a sequence, in which all devices have the same work under a
causal mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def zigzag_permute(x: Any, num_shards: int, *, axis: int = 1) -> Any:
    """Put a sequence into zigzag order: cut into `2 * num_shards` chunks, shard i of
    the result has the chunks i and `2 * num_shards - 1 - i`.

    Args:
        x: an array, or a pytree of arrays (a batch), whose `axis` is the sequence;
            numpy arrays stay numpy arrays.
        num_shards: size of the mesh axis that splits the sequence.
        axis: of the sequence in every array; the default is right for (batch,
            length, ...).

    Raises:
        ValueError: `2 * num_shards` does not divide the axis.

    Example:
        >>> batch = zigzag_permute({"tokens": tokens, "targets": targets}, num_shards=8)
        >>> positions = zigzag_permute(jnp.arange(tokens.shape[1]), 8, axis=0)
    """
    return _reorder(x, _zigzag(num_shards), axis)


def zigzag_unpermute(x: Any, num_shards: int, *, axis: int = 1) -> Any:
    """Undo `zigzag_permute`; the arguments are the same."""
    return _reorder(x, np.argsort(_zigzag(num_shards)), axis)


# --- private -------------------------------------------------------------------------


def _zigzag(num_shards: int) -> np.ndarray:
    if not isinstance(num_shards, int) or num_shards < 1:
        raise ValueError(
            f"attention: num_shards is {num_shards!r}; it must be a positive int."
        )
    first = np.arange(num_shards)
    return np.stack([first, 2 * num_shards - 1 - first], axis=1).reshape(-1)


def _reorder(tree: Any, order: np.ndarray, axis: int) -> Any:
    def one(x: Any) -> Any:
        x = x if isinstance(x, np.ndarray) else jnp.asarray(x)
        at = axis % x.ndim if -x.ndim <= axis < x.ndim else None
        if at is None or x.shape[at] % len(order):
            raise ValueError(
                f"attention: an array of shape {x.shape} cannot be put into zigzag "
                f"order along axis {axis}: the axis must be a multiple of 2 * "
                f"num_shards = {len(order)}."
            )
        shape = x.shape
        chunks = x.reshape(*shape[:at], len(order), -1, *shape[at + 1 :])
        return chunks[(slice(None),) * at + (order,)].reshape(shape)

    return jax.tree.map(one, tree)
