"""Trace a Python mod on scalars and separate its array reads from its arithmetic.

A mod is a Python function of scalars that may read arrays. JAX traces it once; this
module then rewrites the jaxpr so that every array read is one `load` of one element
and everything else is scalar arithmetic. Both the compiled programs (`_program.py`)
and the reference (`_reference.py`) start from that form, so they cannot disagree on
what a mod means.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

# Numbers of leading scalar arguments of a traced function.
INPUTS = {
    "score": ("score", "b", "h", "q", "kv"),
    "mask": ("b", "h", "q", "kv"),
}

# Where a call-like primitive keeps its body; those bodies are inlined.
BODY_PARAM = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
}
CUSTOM_RULE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_RANDOM = ("random_", "threefry", "rng_")


class Unsupported(Exception):
    """A mod uses something that no program can express; the text names it.

    Attributes:
        primitive: the JAX primitive at fault, if it is one.
    """

    def __init__(self, text: str, primitive: str | None = None):
        super().__init__(text)
        self.primitive = primitive


load_p = jex_core.Primitive("fkl_load")


@load_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _load_aval(*indices: Any, capture: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.core.ShapedArray((), np.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Load:
    """One array read of a scalar jaxpr."""

    capture: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A mod after tracing.

    Attributes:
        kind: "score" or "mask".
        closed: jaxpr of `(*inputs, *captures)`; no constants of its own.
        scalar: jaxpr of `(*inputs)` whose array reads are `fkl_load`s, or None.
        loads: the loads of `scalar` in order.
        unsupported: why there is no `scalar`.
    """

    kind: str
    closed: Any
    scalar: Any | None
    loads: tuple[Load, ...]
    unsupported: str | None


def trace(
    function: Callable[..., Any], kind: str, params: Sequence[Any], score_dtype: Any
) -> tuple[Any, list[Any]]:
    """Trace `function(*inputs, *params)`; return its jaxpr and its captured arrays.

    The captures are `params` followed by the arrays and tracers that the function
    closes over.
    """
    avals = [
        *_input_avals(kind, score_dtype),
        *(jax.ShapeDtypeStruct(np.shape(p), p.dtype) for p in params),
    ]
    closed = jax.make_jaxpr(function)(*avals)
    if has_hidden_constants(closed.jaxpr):
        # A jitted function keeps the arrays that it closes over: to be operands they
        # must be constants of the whole.
        closed = jax.make_jaxpr(functools.partial(_evaluate_inlined, closed))(*avals)
    return closed.jaxpr, [*params, *closed.consts]


def analyse(
    jaxpr: Any,
    kind: str,
    capture_avals: Sequence[jax.ShapeDtypeStruct],
    num_params: int,
    score_dtype: Any,
    function: Any,
) -> TracedFunction:
    """Separate array reads from arithmetic in what `trace` returned."""
    inputs = _input_avals(kind, score_dtype)
    n = len(inputs)

    def with_captures(*args: Any) -> Any:
        scalars, leaves = args[:n], args[n:]
        bound = jex_core.ClosedJaxpr(jaxpr, list(leaves[num_params:]))
        return jex_core.jaxpr_as_fun(bound)(*scalars, *leaves[:num_params])[0]

    whole = jax.make_jaxpr(with_captures)(*inputs, *capture_avals)
    scalar, reason = None, None
    try:
        scalar = jax.make_jaxpr(
            lambda *s: _scalarize(jaxpr, num_params, s, capture_avals, function)
        )(*inputs)
    except Unsupported as e:
        reason = str(e)
    loads = () if scalar is None else loads_of(scalar)
    return TracedFunction(kind, whole, scalar, loads, reason)


def loads_of(scalar: Any) -> tuple[Load, ...]:
    """The array reads of a scalar jaxpr, in order."""
    return tuple(
        Load(e.params["capture"], e.params["shape"], np.dtype(e.params["dtype"]))
        for e in scalar.jaxpr.eqns
        if e.primitive is load_p
    )


def with_line(error: Unsupported, jaxpr: Any, function: Any) -> Unsupported:
    """Say where in the user's function the primitive at fault is, if it is there."""
    if error.primitive is None or " at " in str(error):
        return error
    for eqn in _walk(jaxpr):
        if eqn.primitive.name == error.primitive:
            return Unsupported(f"{error}{source_line(eqn, function)}", error.primitive)
    return Unsupported(f"{error} in its derivative", error.primitive)


def text_says_all(jaxpr: Any) -> bool:
    """True if a jaxpr of the same text is the same function: it shows neither a user's
    derivative rule nor the arrays that a jaxpr inside holds."""
    has_rules = any(eqn.primitive.name in CUSTOM_RULE for eqn in _walk(jaxpr))
    return not (has_rules or has_hidden_constants(jaxpr))


def has_hidden_constants(jaxpr: Any) -> bool:
    """True if a jaxpr inside holds arrays of its own, whose contents its text does not
    show."""
    return any(len(inner.consts) for inner in _closed_inside(jaxpr))


def evaluate_with_loads(
    scalar: Any, args: Sequence[Any], load: Callable[[int, Load, list[Any]], Any]
) -> Any:
    """Evaluate a scalar jaxpr, asking `load(number, description, indices)` for each
    array read."""
    env: dict[Any, Any] = dict(zip(scalar.jaxpr.invars, args, strict=True))
    env.update(zip(scalar.jaxpr.constvars, scalar.consts, strict=True))
    number = 0
    for eqn in scalar.jaxpr.eqns:
        xs = [_read(env, v) for v in eqn.invars]
        if eqn.primitive is load_p:
            p = eqn.params
            outs = [
                load(number, Load(p["capture"], p["shape"], np.dtype(p["dtype"])), xs)
            ]
            number += 1
        else:
            outs = _bind(eqn, xs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return _read(env, scalar.jaxpr.outvars[0])


def derivative_jaxpr(traced: TracedFunction) -> Any:
    """Jaxpr of `(score, b, h, q, kv, *loads, ct) -> (dscore, *dload of float loads)`.

    The derivative is JAX's own (`jax.vjp`), so user rules (`custom_jvp`, `custom_vjp`)
    are respected.
    """
    assert traced.scalar is not None
    scalar = traced.scalar
    inputs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in scalar.jaxpr.invars
    ]
    load_avals = [jax.ShapeDtypeStruct((), x.dtype) for x in traced.loads]
    out = scalar.jaxpr.outvars[0].aval

    def pullback(*args: Any) -> list[Any]:
        n = len(inputs)
        scalars, loads, ct = args[:n], args[n:-1], args[-1]
        floats = [k for k, x in enumerate(traced.loads) if x.is_float]

        def f(score: Any, *values: Any) -> Any:
            every = list(loads)
            for k, value in zip(floats, values, strict=True):
                every[k] = value
            return evaluate_with_loads(
                scalar, [score, *scalars[1:]], lambda k, _, __: every[k]
            )

        _, vjp = jax.vjp(f, scalars[0], *(loads[k] for k in floats))
        return list(vjp(ct))

    return jax.make_jaxpr(pullback)(
        *inputs, *load_avals, jax.ShapeDtypeStruct((), out.dtype)
    )


def source_line(eqn: Any, function: Any) -> str:
    """Return " at FILE:LINE" of the user's code that made an equation, or "" if
    unknown."""
    files = {f for f in map(_file_of, _functions(function)) if f}
    frames = getattr(getattr(eqn, "source_info", None), "traceback", None)
    for frame in getattr(frames, "frames", ()):
        if frame.file_name in files:
            return f" at {frame.file_name}:{frame.line_num}"
    return ""


def check_effects(jaxpr: Any, where: str) -> None:
    """Raise if a mod is not a pure function of its arguments."""
    for eqn in _walk(jaxpr):
        name = eqn.primitive.name
        if name.startswith(_RANDOM):
            raise ValueError(
                f"attention: {where} uses randomness ({name}); every score would get "
                "the same number. "
                "Draw the numbers outside, and read them from an array inside the mod."
            )
        if "callback" in name or name in ("debug_print", "debug_callback"):
            raise ValueError(
                f"attention: {where} prints or calls back into Python ({name}); "
                "a mod must be a pure function of its arguments."
            )
    if jaxpr.effects:
        raise ValueError(
            f"attention: {where} has side effects "
            f"({', '.join(map(str, jaxpr.effects))}); "
            "a mod must be a pure function of its arguments."
        )


# --- private -------------------------------------------------------------------------


def _input_avals(kind: str, score_dtype: Any) -> list[jax.ShapeDtypeStruct]:
    integers = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    return (
        [jax.ShapeDtypeStruct((), score_dtype), *integers]
        if kind == "score"
        else integers
    )


def _functions(function: Any) -> list[Any]:
    """The user functions inside a composed one (see `_mods.py`, attribute
    `sources`)."""
    return list(getattr(function, "sources", ())) or [function]


def _file_of(function: Any) -> str | None:
    code = getattr(_unwrap(function), "__code__", None)
    return code.co_filename if isinstance(code, types.CodeType) else None


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__wrapped__", function)


def _walk(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner)


def _closed_inside(jaxpr: Any) -> Iterator[Any]:
    for eqn in _walk(jaxpr):
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex_core.ClosedJaxpr):
                    yield item


def _evaluate_inlined(closed: Any, *args: Any) -> list[Any]:
    """Evaluate, looking into calls that hold constants."""
    env: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        xs = [_read(env, v) for v in eqn.invars]
        body = eqn.params.get(BODY_PARAM.get(eqn.primitive.name, ""))
        holds_constants = isinstance(body, jex_core.ClosedJaxpr) and (
            body.consts or has_hidden_constants(body.jaxpr)
        )
        outs = _evaluate_inlined(body, *xs) if holds_constants else _bind(eqn, xs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in closed.jaxpr.outvars]


def _read(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, jex_core.Literal) else env[v]


def _bind(eqn: Any, xs: Sequence[Any]) -> list[Any]:
    out = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


@dataclasses.dataclass(frozen=True)
class _View:
    """A slice of a captured array: `starts[d]` is the index along axis d at view
    position 0.

    `axes[d]` is the view axis that moves along the array's axis d, or None; `steps[d]`
    its step.
    """

    capture: int
    array_shape: tuple[int, ...]
    dtype: Any
    starts: tuple[Any, ...]
    axes: tuple[int | None, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]

    def element(self) -> Any:
        indices = [lax.convert_element_type(i, jnp.int32) for i in self.starts]
        return load_p.bind(
            *indices,
            capture=self.capture,
            shape=self.array_shape,
            dtype=np.dtype(self.dtype),
        )

    def is_whole(self, axis: int) -> bool:
        """True if the view axis is an axis of the array, from its first to its last
        element."""
        return all(
            self.shape[axis] == self.array_shape[d]
            and self.steps[d] == 1
            and isinstance(self.starts[d], int)
            for d, a in enumerate(self.axes)
            if a == axis
        )

    def moved(self, moves: Sequence[tuple[Any, int, int]]) -> "_View":
        """Slice view axis a to (start, size, step) = moves[a]."""
        starts, steps = list(self.starts), list(self.steps)
        for d, a in enumerate(self.axes):
            if a is not None:
                start, _, step = moves[a]
                starts[d] = _add(starts[d], _mul(start, self.steps[d]))
                steps[d] = self.steps[d] * step
        return dataclasses.replace(
            self,
            starts=tuple(starts),
            steps=tuple(steps),
            shape=tuple(size for _, size, _ in moves),
        )

    def reindexed(self, old_to_new: dict[int, int], shape: Sequence[int]) -> "_View":
        """Rename view axes; axes left out must have size 1."""
        axes = tuple(None if a is None else old_to_new.get(a) for a in self.axes)
        return dataclasses.replace(self, axes=axes, shape=tuple(shape))


@dataclasses.dataclass(frozen=True)
class _Vector:
    """A short 1-d array of scalars: the index vector of a gather."""

    items: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.items),)


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int) and a == 0:
        return b
    if isinstance(b, int) and b == 0:
        return a
    return lax.add(
        jnp.int32(a) if isinstance(a, int) else a,
        jnp.int32(b) if isinstance(b, int) else b,
    )


def _mul(a: Any, step: int) -> Any:
    return (
        a
        if step == 1
        else a * step
        if isinstance(a, int)
        else lax.mul(a, jnp.int32(step))
    )


def _scalarize(
    jaxpr: Any,
    num_params: int,
    scalars: Sequence[Any],
    captures: Sequence[Any],
    function: Any,
) -> Any:
    """Evaluate `jaxpr` with captured arrays as views; the result is a scalar tracer."""
    n = len(scalars)
    explicit = [_capture_view(k, c) for k, c in enumerate(captures[:num_params])]
    consts = [
        _capture_view(k, c) for k, c in enumerate(captures[num_params:], num_params)
    ]
    assert len(jaxpr.invars) == n + num_params
    (result,) = _run_views(jaxpr, consts, [*scalars, *explicit], function)
    return _scalar(result)


def _capture_view(k: int, c: Any) -> _View:
    shape = tuple(np.shape(c))
    if len(shape) > 8:
        raise Unsupported(f"a captured array with {len(shape)} axes (at most 8)")
    return _View(
        k,
        shape,
        c.dtype,
        (0,) * len(shape),
        tuple(range(len(shape))),
        (1,) * len(shape),
        shape,
    )


def _scalar(x: Any) -> Any:
    if isinstance(x, _View):
        if any(d != 1 for d in x.shape):
            raise Unsupported(f"an array of shape {x.shape} where a scalar is needed")
        return x.element()
    if isinstance(x, _Vector):
        if len(x.items) != 1:
            raise Unsupported("a vector where a scalar is needed")
        return x.items[0]
    return x


def _run_views(jaxpr: Any, consts: Any, args: Any, function: Any) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        xs = [_read(env, v) for v in eqn.invars]
        try:
            outs = _step(eqn, xs, function)
        except Unsupported as e:
            if " at " in str(e):
                raise
            raise Unsupported(f"{e}{source_line(eqn, function)}") from None
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


def _is_array(x: Any) -> bool:
    return isinstance(x, _View | _Vector) or np.ndim(x) > 0


def _step(eqn: Any, xs: list[Any], function: Any) -> list[Any]:
    name = eqn.primitive.name
    if name in BODY_PARAM:
        return _inline(eqn.params[BODY_PARAM[name]], xs, function)
    if any(map(_is_array, xs)) or any(v.aval.shape for v in eqn.outvars):
        if name in _ARRAY_OPS:
            return [_ARRAY_OPS[name](eqn, xs)]
        if name in CUSTOM_RULE:
            xs = [_scalar(x) for x in xs]
        elif any(v.aval.shape for v in eqn.outvars):
            raise Unsupported(f"the primitive `{name}` on arrays")
    xs = [_scalar(x) for x in xs]
    return _bind(eqn, xs)


def _inline(body: Any, xs: list[Any], function: Any) -> list[Any]:
    inner, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    # Constants inside a closed body are baked arrays; only scalars have a place in a
    # program.
    if any(np.ndim(c) for c in consts):
        raise Unsupported("a constant array inside a nested jit")
    return _run_views(inner, consts, xs, function)


def _view(x: Any) -> _View:
    if not isinstance(x, _View):
        raise Unsupported("an array that is computed inside the mod")
    return x


def _dynamic_slice(eqn: Any, xs: list[Any]) -> Any:
    view, starts = _view(xs[0]), xs[1:]
    sizes = eqn.params["slice_sizes"]
    moves: list[tuple[Any, int, int]] = []
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        full = view.shape[axis]
        if size == full:
            start = 0
        else:
            start = lax.convert_element_type(_scalar(start), jnp.int32)
            # XLA clamps the start so that the slice fits; a load clamps to the array's
            # own axis, so one element of a whole axis needs no clamp of its own.
            if size > 1 or not view.is_whole(axis):
                start = lax.max(lax.min(start, jnp.int32(full - size)), jnp.int32(0))
        moves.append((start, size, 1))
    return view.moved(moves)


def _slice(eqn: Any, xs: list[Any]) -> Any:
    p = eqn.params
    if isinstance(xs[0], _Vector):
        (a,), (b,), s = p["start_indices"], p["limit_indices"], p["strides"]
        return _Vector(xs[0].items[a : b : s[0] if s else 1])
    view = _view(xs[0])
    steps = p["strides"] or (1,) * len(view.shape)
    moves = [
        (a, -(-(b - a) // s), s)
        for a, b, s in zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    ]
    return view.moved(moves)


def _squeeze(eqn: Any, xs: list[Any]) -> Any:
    if isinstance(xs[0], _Vector):
        return _scalar(xs[0])
    view = _view(xs[0])
    keep = [a for a in range(len(view.shape)) if a not in eqn.params["dimensions"]]
    return view.reindexed(
        {a: k for k, a in enumerate(keep)}, [view.shape[a] for a in keep]
    )


def _reshape(eqn: Any, xs: list[Any]) -> Any:
    shape = tuple(eqn.outvars[0].aval.shape)
    x = xs[0]
    if isinstance(x, _Vector):
        return x if shape == x.shape else _scalar(x)
    if not isinstance(x, _View):
        if np.ndim(x):
            raise Unsupported("a reshape of a computed array")
        return _Vector((x,)) if shape == (1,) else x
    old = [a for a, d in enumerate(x.shape) if d != 1]
    new = [a for a, d in enumerate(shape) if d != 1]
    if [x.shape[a] for a in old] != [shape[a] for a in new]:
        raise Unsupported(f"a reshape from {x.shape} to {shape}")
    return x.reindexed(dict(zip(old, new, strict=True)), shape)


def _transpose(eqn: Any, xs: list[Any]) -> Any:
    view, permutation = _view(xs[0]), eqn.params["permutation"]
    return view.reindexed(
        {a: k for k, a in enumerate(permutation)}, [view.shape[a] for a in permutation]
    )


def _broadcast(eqn: Any, xs: list[Any]) -> Any:
    shape = tuple(eqn.params["shape"])
    x = xs[0]
    if isinstance(x, _View):
        dims = eqn.params["broadcast_dimensions"]
        moved = {
            a: d
            for a, d in enumerate(dims)
            if x.shape[a] == shape[d] and x.shape[a] != 1
        }
        return x.reindexed(moved, shape)
    if isinstance(x, _Vector):
        if shape != x.shape:
            raise Unsupported("a broadcast of a vector")
        return x
    if shape == ():
        return x
    if len(shape) == 1 and shape[0] <= 8:
        return _Vector((x,) * shape[0])
    raise Unsupported(f"an array of shape {shape} built inside the mod")


def _concatenate(eqn: Any, xs: list[Any]) -> Any:
    items: list[Any] = []
    for x in xs:
        if isinstance(x, _View):
            if x.shape != (1,):
                raise Unsupported("a concatenation of arrays")
            items.append(x.element())
        elif isinstance(x, _Vector):
            items.extend(x.items)
        elif np.ndim(x) == 1:
            items.extend(jnp.asarray(v) for v in np.asarray(x))
        else:
            raise Unsupported("a concatenation of arrays")
    return _Vector(tuple(items))


def _gather(eqn: Any, xs: list[Any]) -> Any:
    p = eqn.params
    view, indices, dn = _view(xs[0]), xs[1], p["dimension_numbers"]
    if isinstance(indices, _Vector):
        items = indices.items
    elif isinstance(indices, _View) or np.ndim(indices):
        raise Unsupported("a gather with an array of indices")
    else:
        items = (indices,)
    if dn.operand_batching_dims or len(items) != len(dn.start_index_map):
        raise Unsupported("a batched gather")
    moves: list[tuple[Any, int, int]] = [(0, d, 1) for d in view.shape]
    inside = None
    for axis, item in zip(dn.start_index_map, items, strict=True):
        size, full = p["slice_sizes"][axis], view.shape[axis]
        index = lax.convert_element_type(_scalar(item), jnp.int32)
        if p["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP:
            ok = lax.bitwise_and(
                lax.ge(index, jnp.int32(0)), lax.le(index, jnp.int32(full - size))
            )
            inside = ok if inside is None else lax.bitwise_and(inside, ok)
        index = lax.max(lax.min(index, jnp.int32(full - size)), jnp.int32(0))
        moves[axis] = (index, size, 1)
    for axis, size in enumerate(p["slice_sizes"]):
        if axis not in dn.start_index_map and size != view.shape[axis]:
            moves[axis] = (0, size, 1)
    keep = [a for a in range(len(view.shape)) if a not in dn.collapsed_slice_dims]
    moved = view.moved(moves)
    out = moved.reindexed(
        {a: k for k, a in enumerate(keep)}, [moved.shape[a] for a in keep]
    )
    if inside is None:
        return out
    value = _scalar(out)
    fill = p["fill_value"]
    if fill is None:
        fill = (
            np.nan
            if jnp.issubdtype(value.dtype, jnp.inexact)
            else np.iinfo(value.dtype).min
        )
    return lax.select(inside, value, lax.full_like(value, fill))


def _convert(eqn: Any, xs: list[Any]) -> Any:
    x = xs[0]
    if isinstance(x, _View):
        if any(d != 1 for d in x.shape):
            raise Unsupported(
                "a conversion of a whole array; convert it outside the mod"
            )
        x = x.element()
    if isinstance(x, _Vector):
        return _Vector(tuple(_bind(eqn, [i])[0] for i in x.items))
    return _bind(eqn, [x])[0]


def _copy(eqn: Any, xs: list[Any]) -> Any:
    return xs[0]


_ARRAY_OPS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "gather": _gather,
    "convert_element_type": _convert,
    "copy": _copy,
    "copy_p": _copy,
}
