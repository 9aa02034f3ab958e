"""Differentiation: a `custom_vjp` around the two primitives.

The forward saves the operands, out and lse, the last two under the checkpoint names
"fkl_out" and "fkl_lse"; the backward consumes them and computes only the gradients
that somebody asked for.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from . import _primitives, _reference
from ._spec import AttentionSpec


@functools.lru_cache(maxsize=4096)
def compiled_attention(
    spec: AttentionSpec,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `(*operands) -> (out, lse)` on the custom calls, jitted; the same
    function for an equal spec."""

    @jax.custom_vjp
    def fkl_attention(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _primitives.forward(spec, operands)

    def fwd(*inputs: Any) -> Any:
        operands = tuple(x.value for x in inputs)
        out, lse = _primitives.forward(spec, operands)
        # Both names must be saved for a remat policy to spare the forward kernel.
        out, lse = checkpoint_name(out, "fkl_out"), checkpoint_name(lse, "fkl_lse")
        asked = _Static(tuple(x.perturbed for x in inputs))
        return (out, lse), (operands, out, lse, asked)

    def bwd(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        operands, out, lse, asked = saved
        dout, dlse = map(_instantiate, cotangents)
        return _gradients(spec, operands, out, lse, dout, dlse, asked.value)

    fkl_attention.defvjp(fwd, bwd, symbolic_zeros=True)
    return jax.jit(fkl_attention)


@functools.lru_cache(maxsize=4096)
def reference_attention(
    spec: AttentionSpec,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return `(*operands) -> (out, lse)` in plain JAX, jitted; differentiable in both
    modes, to any order."""

    def fkl_attention_xla(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _reference.forward(spec, operands)

    return jax.jit(fkl_attention_xla)


# --- private -------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class _Static:
    """A residual that is not an array."""

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: Any) -> "_Static":
        return cls(value)


def _instantiate(ct: Any) -> jax.Array:
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
    kernel = tuple(r for r in wanted if r != "sinks" and not _is_mask_capture(spec, r))
    if kernel:
        grads = _primitives.backward(spec, (*operands, out, lse, dout, dlse), kernel)
        by_role.update(zip(kernel, grads, strict=True))
    if "sinks" in wanted:
        sinks = operands[spec.operands.index("sinks")]
        by_role["sinks"] = _sinks_gradient(sinks, out, lse, dout, dlse)
    result = []
    for role, x in zip(spec.operands, operands, strict=True):
        if role in by_role:
            result.append(by_role[role].astype(x.dtype))
        else:
            result.append(jnp.zeros_like(x) if role in wanted else None)
    return tuple(result)


def _is_mask_capture(spec: AttentionSpec, role: str) -> bool:
    name, _, number = role.partition(".")
    return name == "capture" and int(number) >= spec.num_score_captures


def _sinks_gradient(
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
