"""Differentiation: a `custom_vjp` around the two primitives.

The forward saves the operands, out and lse, the last two under the checkpoint names
"fkl_out" and "fkl_lse"; the backward consumes them and computes only the gradients
that somebody asked for.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from . import _avals, _partition, _primitives
from ._spec import AttentionSpec


@functools.lru_cache(maxsize=4096)
def compiled_attention(
    spec: AttentionSpec, implied: tuple[str, ...] = ()
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `(*operands) -> (out, lse)` on the custom calls, jitted; the same
    function for an equal spec.

    The roles `implied`, the last ones of the spec, are no operands:
    `implied_operands` makes them.
    """

    @jax.custom_vjp
    def attend(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _partition.forward(spec, operands)

    def fwd(*inputs: Any) -> Any:
        operands = tuple(x.value for x in inputs)
        out, lse = _partition.forward(spec, operands)
        # Both names must be saved for a remat policy to spare the forward kernel.
        out, lse = checkpoint_name(out, "fkl_out"), checkpoint_name(lse, "fkl_lse")
        asked = as_residual([x.perturbed for x in inputs])
        return (out, lse), (operands, out, lse, asked)

    def bwd(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        operands, out, lse, asked = saved
        dout, dlse = map(instantiate, cotangents)
        flags = of_residual(asked, len(operands))
        return _gradients(spec, operands, out, lse, dout, dlse, flags)

    attend.defvjp(fwd, bwd, symbolic_zeros=True)

    def fkl_attention(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend(*_all(spec, implied, operands))

    return jax.jit(fkl_attention)


@functools.lru_cache(maxsize=4096)
def reference_attention(
    spec: AttentionSpec, implied: tuple[str, ...] = ()
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `(*operands) -> (out, lse)` in plain JAX, jitted; differentiable in both
    modes, to any order. `implied` as in `compiled_attention`."""

    def fkl_attention_xla(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _primitives.plain_forward(spec, _all(spec, implied, operands))

    return jax.jit(fkl_attention_xla)


# --- private -------------------------------------------------------------------------


# Which operands are differentiated is static and differs from one differentiation to
# the next. JAX remembers one structure of the residuals for all of them, so a static
# node in there may be that of another one: the flags travel as the shape of an empty
# array.
_FLAGS_PER_AXIS = 16


def as_residual(flags: Sequence[bool]) -> jax.Array:
    """Flags as a residual of a custom_vjp."""
    sizes = [
        sum(flag << k for k, flag in enumerate(flags[start : start + _FLAGS_PER_AXIS]))
        for start in range(0, len(flags), _FLAGS_PER_AXIS)
    ]
    return jnp.zeros((0, *(size + 1 for size in sizes)), bool)


def of_residual(residual: jax.Array, count: int) -> tuple[bool, ...]:
    """The flags that `as_residual` was given."""
    sizes = residual.shape[1:]
    at = (divmod(k, _FLAGS_PER_AXIS) for k in range(count))
    return tuple(bool(sizes[axis] - 1 >> bit & 1) for axis, bit in at)


def _all(
    spec: AttentionSpec, implied: tuple[str, ...], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The operands, the implied ones too.

    Inside a shard_map one that is the same on all devices varies like the others from
    here on, so that its gradient is summed over them, once."""
    return _avals.vary_alike([*operands, *implied_operands(spec, implied, operands[0])])


def implied_operands(
    spec: AttentionSpec, roles: tuple[str, ...], query: jax.Array
) -> tuple[Any, ...]:
    """Operands that follow from the shape of the query."""
    *batch, _, num_heads, head_dim = query.shape[-3 - spec.num_batch_dims :]
    acc = np.float64 if query.dtype == np.float64 else np.float32
    make: dict[str, Callable[[], Any]] = {
        "scale": lambda: np.asarray(1 / np.sqrt(head_dim), acc),
        "batch_index": lambda: jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(
            batch
        ),
        "head_index": lambda: jnp.arange(num_heads, dtype=jnp.int32),
    }
    return tuple(make[role]() for role in roles)


def instantiate(ct: Any) -> jax.Array:
    return jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct


def _gradients(
    spec: AttentionSpec,
    operands: tuple[jax.Array, ...],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    asked: tuple[bool, ...],
) -> tuple[Any, ...]:
    wanted = [
        role
        for role, x, a in zip(spec.operands, operands, asked, strict=True)
        if a and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    by_role: dict[str, Any] = {}
    # Captures of the mask have no gradient: a bool does not move.
    kernel = tuple(r for r in wanted if r != "sinks" and not is_mask_capture(spec, r))
    if kernel:
        # Cotangents that are zero, or come from elsewhere, need not vary as out does.
        inputs = _avals.vary_alike((*operands, out, lse, dout, dlse))
        grads = _partition.backward(spec, inputs, kernel)
        by_role.update(zip(kernel, grads, strict=True))
    if "sinks" in wanted:
        sinks = operands[spec.operands.index("sinks")]
        dsinks = sinks_gradient(sinks, out, lse, dout, dlse)
        by_role["sinks"] = _avals.shard_alike(dsinks, sinks)
    result = []
    for role, x in zip(spec.operands, operands, strict=True):
        if role in by_role:
            result.append(by_role[role].astype(x.dtype))
        else:
            result.append(jnp.zeros_like(x) if role in wanted else None)
    return tuple(result)


def is_mask_capture(spec: AttentionSpec, role: str) -> bool:
    name, _, number = role.partition(".")
    return name == "capture" and int(number) >= spec.num_score_captures


def sinks_gradient(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array
) -> jax.Array:
    """The sink is a logit with value 0: its dP is 0, so its ds is `-P * D`, summed
    over batch and queries."""
    has_key = lse > -jnp.inf
    probability = jnp.exp(
        jnp.where(
            has_key,
            jnp.expand_dims(sinks, tuple(range(lse.ndim - 2)) + (-1,)) - lse,
            -jnp.inf,
        )
    )
    product = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(product, -1, -2) - dlse
    ds = jnp.where(has_key, -probability * delta, 0)
    axes = tuple(a for a in range(ds.ndim) if a != ds.ndim - 2)
    return ds.sum(axes)
