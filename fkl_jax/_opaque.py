"""A function of arrays as one primitive that is traced as on one device.

Plain JAX inside `shard_map(check_vma=True)`, or with arrays sharded by explicit axes of
a mesh, must say of every constant and loop carry over which axes it varies and how it
is sharded. Code that computes the same on any device's part of the arrays need not: it
is traced off the mesh, and only the types of its results say something. All
transformations apply, to any order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from . import _avals

opaque_p = jex_core.Primitive("fkl_opaque")
opaque_p.multiple_results = True


def run(
    function: Callable[..., Any],
    operands: Sequence[Any],
    results: Callable[[], Sequence[_avals.Aval]],
) -> Sequence[jax.Array]:
    """Return `function(*operands)`, as one primitive where types are about a mesh."""
    if not _avals.are_about_mesh():
        return function(*operands)
    return call(function, operands, results())


def call(
    function: Callable[..., Any],
    operands: Sequence[Any],
    results: Sequence[_avals.Aval],
    num_linear: int = 0,
) -> list[jax.Array]:
    """Return `function(*operands)`: arrays of the types `results`. The operands vary
    alike; the function closes over no tracer, and is linear in the last `num_linear`
    operands."""
    avals = [_avals.plain(jax.typeof(x)) for x in operands]
    with _avals.off_mesh():
        jaxpr = jax.make_jaxpr(lambda *xs: tuple(function(*xs)))(*avals)
    return opaque_p.bind(
        *operands, jaxpr=jaxpr, results=tuple(results), num_linear=num_linear
    )


def lower_off_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lowering rule that traces a function as on one device."""
    rule = mlir.lower_fun(function, multiple_results=True)

    def lowered(ctx: Any, *args: Any, **params: Any) -> Any:
        with _avals.off_mesh():
            avals = [_avals.plain(a) for a in ctx.avals_in]
            return rule(ctx.replace(avals_in=avals), *args, **params)

    return lowered


# --- private -------------------------------------------------------------------------


def _impl(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):
        return jax.jit(functools.partial(opaque_p.bind, **params))(*args)


def _abstract_eval(*avals: Any, results: Any, **_: Any) -> list[_avals.Aval]:
    return list(results)


def _lowered(*args: Any, jaxpr: Any, **_: Any) -> Any:
    return jex_core.jaxpr_as_fun(jaxpr)(*args)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, **params: Any
) -> Any:
    active = [k for k, t in enumerate(tangents) if type(t) is not ad.Zero]
    n = len(primals)

    def tangent(*args: Any) -> Any:
        def of_active(*xs: Any) -> Any:
            every = list(args[:n])
            for k, x in zip(active, xs, strict=True):
                every[k] = x
            return jex_core.jaxpr_as_fun(jaxpr)(*every)

        return jax.jvp(of_active, [args[k] for k in active], list(args[n:]))[1]

    moving = [tangents[k] for k in active]
    out = opaque_p.bind(*primals, jaxpr=jaxpr, **params)
    operands = _avals.vary_alike([*primals, *moving])
    return out, call(tangent, operands, params["results"], len(moving))


def _transpose(
    cotangents: Sequence[Any], *args: Any, jaxpr: Any, results: Any, **_: Any
) -> list[Any]:
    asked = [k for k, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [x for x in args if not ad.is_undefined_primal(x)]
    given = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    plain = [_avals.plain(args[k].aval) for k in asked]

    def pullback(*xs: Any) -> Any:
        fixed = iter(xs[: len(known)])
        fixed_args = [None if k in asked else next(fixed) for k in range(len(args))]

        def of_asked(*ys: Any) -> Any:
            every = list(fixed_args)
            for k, y in zip(asked, ys, strict=True):
                every[k] = y
            out = jex_core.jaxpr_as_fun(jaxpr)(*every)
            return [out[k] for k in given]

        _, pull = jax.vjp(of_asked, *(jnp.zeros(a.shape, a.dtype) for a in plain))
        return pull(list(xs[len(known) :]))

    operands = _avals.vary_alike([*known, *(cotangents[k] for k in given)])
    out = call(pullback, operands, [args[k].aval for k in asked], len(given))
    grads: list[Any] = [None] * len(args)
    for k, x in zip(asked, out, strict=True):
        grads[k] = x
    return grads


def _batch(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: Any,
    results: Any,
    num_linear: int,
) -> Any:
    size, entry = next(
        (x.shape[d], _avals.spec_of(jax.typeof(x))[d])
        for x, d in zip(args, dims, strict=True)
        if d is not None
    )
    mapped = jax.vmap(jex_core.jaxpr_as_fun(jaxpr), tuple(dims), axis_size=size)
    avals = [
        _avals.result([a], (size, *a.shape), a.dtype, (entry, *_avals.spec_of(a)))
        for a in results
    ]
    return call(mapped, args, avals, num_linear), [0] * len(results)


opaque_p.def_impl(_impl)
opaque_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(opaque_p, lower_off_mesh(_lowered))
ad.primitive_jvps[opaque_p] = _jvp
ad.primitive_transposes[opaque_p] = _transpose
batching.primitive_batchers[opaque_p] = _batch
