"""The two primitives: abstract evaluation, batching, lowering per platform, and the
rule for second derivatives."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _backends, _ffi, _reference
from ._spec import AttentionSpec

fwd_p = Primitive("fkl_attention_fwd")
bwd_p = Primitive("fkl_attention_bwd")
# Operands of the backward after the spec's own.
SAVED = ("out", "lse", "dout", "dlse")


def forward(
    spec: AttentionSpec, operands: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Bind the forward primitive: out and lse."""
    out, lse = fwd_p.bind(*operands, spec=spec)
    return out, lse


def backward(
    spec: AttentionSpec, operands: Sequence[Any], results: tuple[str, ...]
) -> list[jax.Array]:
    """Bind the backward primitive; `operands` ends with out, lse, dout, dlse."""
    return bwd_p.bind(*operands, spec=spec, results=results)


# --- private -------------------------------------------------------------------------


def _vmap_shape(
    spec: AttentionSpec, roles: Sequence[str], avals: Sequence[Any]
) -> tuple[int, ...]:
    """The vmap axes of a call: each operand has all of them, of full size or 1."""
    leads = [
        a.shape[: a.ndim - spec.base_ndim(r)] for r, a in zip(roles, avals, strict=True)
    ]
    assert len({len(lead) for lead in leads}) == 1, (roles, leads)
    return np.broadcast_shapes(*leads)


def _fwd_avals(*avals: Any, spec: AttentionSpec) -> list[Any]:
    lead = _vmap_shape(spec, spec.operands, avals)
    query, value = avals[0], avals[2]
    own = query.shape[query.ndim - spec.base_ndim("query") :]
    *batch, t, n, _ = own
    lse_dtype = np.float64 if query.dtype == jnp.float64 else np.float32
    return [
        jax.core.ShapedArray((*lead, *batch, t, n, value.shape[-1]), query.dtype),
        jax.core.ShapedArray((*lead, *batch, n, t), np.dtype(lse_dtype)),
    ]


def _bwd_avals(*avals: Any, spec: AttentionSpec, results: tuple[str, ...]) -> list[Any]:
    lead = _vmap_shape(spec, (*spec.operands, *SAVED), avals)
    out = []
    for role in results:
        x = avals[spec.operands.index(role)]
        own = x.shape[x.ndim - spec.base_ndim(role) :]
        same = role in ("query", "key", "value")
        dtype = x.dtype if same else _reference.gradient_dtype(x.dtype)
        out.append(jax.core.ShapedArray((*lead, *own), dtype))
    return out


def _fwd_reference(*operands: Any, spec: AttentionSpec) -> list[jax.Array]:
    return list(_reference.forward(spec, operands))


def _bwd_reference(
    *operands: Any, spec: AttentionSpec, results: tuple[str, ...]
) -> list[Any]:
    n = len(spec.operands)
    out, lse, dout, dlse = operands[n:]
    return list(_reference.backward(spec, operands[:n], out, lse, dout, dlse, results))


def _fwd_custom_call(
    *operands: Any, spec: AttentionSpec, platform: str
) -> list[jax.Array]:
    out, lse = _fwd_avals(*map(jax.typeof, operands), spec=spec)
    return list(_ffi.call_forward(spec, operands, out, lse, platform))


def _bwd_custom_call(
    *operands: Any, spec: AttentionSpec, results: tuple[str, ...], platform: str
) -> list[Any]:
    avals = _bwd_avals(*map(jax.typeof, operands), spec=spec, results=results)
    return _ffi.call_backward(spec, operands, results, avals, platform)


def _or_reference(custom_call: Any, reference: Any) -> Any:
    """Plain JAX, announced, for what only the shapes and results at hand show that the
    CUDA kernels cannot take: vmap axes, gradients."""

    def lowered(*operands: Any, **params: Any) -> Any:
        try:
            _backends.check_cuda_runs()
            return custom_call(*operands, **params, platform="cuda")
        except NotImplementedError as refusal:
            _backends.announce(str(refusal))
            return reference(*operands, **params)

    return lowered


def _batch(
    p: Primitive, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> Any:
    """Give every operand a new leading axis, of size 1 where it is not mapped: nothing
    is copied, no axis is folded."""
    args = [
        jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    out = p.bind(*args, **params)
    return out, [0] * len(out)


def _jvp(
    p: Primitive, reference: Any, primals: Any, tangents: Any, **params: Any
) -> Any:
    """Reached only when a gradient is differentiated again; the derivative is that of
    the reference."""
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def f(*xs: Any) -> Any:
        args = list(primals)
        for i, x in zip(active, xs, strict=True):
            args[i] = x
        return reference(*args, **params)

    _, out = jax.jvp(f, [primals[i] for i in active], [tangents[i] for i in active])
    return p.bind(*primals, **params), out


@functools.cache
def _jitted(p: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *args: p.bind(*args, **dict(params)))


def _define(p: Primitive, avals: Any, reference: Any, custom_call: Any) -> None:
    p.multiple_results = True
    p.def_abstract_eval(avals)

    def impl(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _jitted(p, tuple(sorted(params.items())))(*args)

    p.def_impl(impl)
    mlir.register_lowering(p, mlir.lower_fun(reference, multiple_results=True))
    lowerings = {
        "cpu": functools.partial(custom_call, platform="cpu"),
        "cuda": _or_reference(custom_call, reference),
    }
    for platform, lowering in lowerings.items():
        mlir.register_lowering(
            p, mlir.lower_fun(lowering, multiple_results=True), platform=platform
        )
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    ad.primitive_jvps[p] = functools.partial(_jvp, p, reference)


_define(fwd_p, _fwd_avals, _fwd_reference, _fwd_custom_call)
_define(bwd_p, _bwd_avals, _bwd_reference, _bwd_custom_call)
