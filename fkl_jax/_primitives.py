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

from . import _avals, _backends, _ffi, _opaque, _reference
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


def plain_forward(
    spec: AttentionSpec, operands: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Out and lse in plain JAX."""
    out, lse = _opaque.run(
        functools.partial(_fwd_reference, spec=spec),
        operands,
        lambda: _fwd_avals(*map(jax.typeof, operands), spec=spec),
    )
    return out, lse


def backward(
    spec: AttentionSpec, operands: Sequence[Any], results: tuple[str, ...]
) -> list[jax.Array]:
    """Bind the backward primitive; `operands` ends with out, lse, dout, dlse."""
    return bwd_p.bind(*operands, spec=spec, results=results)


def plain_backward(
    spec: AttentionSpec, operands: Sequence[Any], results: tuple[str, ...]
) -> list[jax.Array]:
    """`backward` in plain JAX."""
    return list(
        _opaque.run(
            functools.partial(_bwd_reference, spec=spec, results=results),
            operands,
            lambda: _bwd_avals(*map(jax.typeof, operands), spec=spec, results=results),
        )
    )


def tangents(
    spec: AttentionSpec,
    results: tuple[str, ...] | None,
    primals: Sequence[Any],
    moves: Sequence[Any],
) -> tuple[jax.Array, ...]:
    """The tangents of the forward (`results` None) or of the backward, by the
    reference; `moves` are tangents of operands, None for zero. Reached only when a
    gradient is differentiated again."""
    params: dict[str, Any] = {"spec": spec}
    reference: Any = _fwd_reference
    avals: Any = _fwd_avals
    if results is not None:
        params["results"] = results
        reference, avals = _bwd_reference, _bwd_avals
    active = [i for i, t in enumerate(moves) if t is not None]

    def f(*xs: Any) -> Any:
        args = list(primals)
        for i, x in zip(active, xs, strict=True):
            args[i] = x
        return tuple(
            _opaque.run(
                functools.partial(reference, **params),
                args,
                lambda: avals(*map(jax.typeof, args), **params),
            )
        )

    return jax.jvp(f, [primals[i] for i in active], [moves[i] for i in active])[1]


# --- private -------------------------------------------------------------------------


def _split(
    spec: AttentionSpec, roles: Sequence[str], avals: Sequence[Any]
) -> tuple[list[tuple[int, Any]], dict[str, list[tuple[int, Any]]]]:
    """Sizes and partition spec entries of a call: those of its vmap axes, which each
    operand has, of full size or 1, and by role those of the operand's own axes."""
    lead: list[tuple[int, Any]] | None = None
    own = {}
    for role, a in zip(roles, avals, strict=True):
        axes = list(zip(a.shape, _avals.spec_of(a), strict=True))
        count = a.ndim - spec.base_ndim(role)
        own[role] = axes[count:]
        if lead is None:
            lead = axes[:count]
        assert len(lead) == count, (roles, avals)
        lead = [_wider(x, y) for x, y in zip(lead, axes[:count], strict=True)]
    assert lead is not None
    return lead, own


def _wider(x: tuple[int, Any], y: tuple[int, Any]) -> tuple[int, Any]:
    """Which of two sizes of a vmap axis is the full one; 0 is."""
    if x[0] == y[0]:
        return x if x[1] is not None else y
    assert x[0] == 1 or y[0] == 1, (x, y)
    return y if x[0] == 1 else x


def _aval(avals: Sequence[Any], axes: Sequence[tuple[int, Any]], dtype: Any) -> Any:
    shape, entries = zip(*axes, strict=True) if axes else ((), ())
    return _avals.result(avals, shape, dtype, entries)


def _fwd_avals(*avals: Any, spec: AttentionSpec) -> list[Any]:
    lead, own = _split(spec, spec.operands, avals)
    *batch, t, n, _ = own["query"]
    query = avals[0]
    lse_dtype = np.float64 if query.dtype == jnp.float64 else np.float32
    out = [*lead, *batch, t, n, (own["value"][-1][0], None)]
    return [
        _aval(avals, out, query.dtype),
        _aval(avals, [*lead, *batch, n, t], np.dtype(lse_dtype)),
    ]


def _bwd_avals(*avals: Any, spec: AttentionSpec, results: tuple[str, ...]) -> list[Any]:
    lead, own = _split(spec, (*spec.operands, *SAVED), avals)
    out = []
    for role in results:
        x = avals[spec.operands.index(role)]
        same = role in ("query", "key", "value")
        dtype = x.dtype if same else _reference.gradient_dtype(avals[0].dtype)
        out.append(_aval(avals, [*lead, *own[role]], dtype))
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


def _jvp(p: Primitive, primals: Any, moves: Any, **params: Any) -> Any:
    moves = [None if type(t) is ad.Zero else t for t in moves]
    out = tangents(params["spec"], params.get("results"), primals, moves)
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
    lowerings = {
        None: reference,
        "cpu": functools.partial(custom_call, platform="cpu"),
        "cuda": _or_reference(custom_call, reference),
    }
    for platform, lowering in lowerings.items():
        rule = _opaque.lower_off_mesh(lowering)
        mlir.register_lowering(p, rule, platform=platform)
    batching.primitive_batchers[p] = functools.partial(_batch, p)
    ad.primitive_jvps[p] = functools.partial(_jvp, p)


_define(fwd_p, _fwd_avals, _fwd_reference, _fwd_custom_call)
_define(bwd_p, _bwd_avals, _bwd_reference, _bwd_custom_call)
