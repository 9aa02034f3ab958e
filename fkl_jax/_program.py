"""Typed SSA programs: what a mod becomes for the compiled backends.

A program has values of type `f32`, `i32` or `bool`, each made by one instruction.
Emission shares equal values (common subexpressions), folds constants and keeps only
what the results need, so the canonical text of a program is its identity: an equal
lambda made anew gives the same text, hence the same compiled code.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from . import _trace

F32, I32, BOOL = "f32", "i32", "bool"

# Names of all operations; the position is the number in the bytecode. The same list is
# in ffi/cpu/program_ops.h.
OPS = (  # noqa: SIM905 - a table of words reads better than one word a line
    "const input load "
    "add.f32 sub.f32 mul.f32 div.f32 rem.f32 max.f32 min.f32 pow.f32 atan2.f32 fma.f32 "
    "neg.f32 abs.f32 sign.f32 sqrt.f32 rsqrt.f32 exp.f32 exp2.f32 expm1.f32 log.f32 "
    "log1p.f32 tanh.f32 sin.f32 cos.f32 tan.f32 erf.f32 floor.f32 ceil.f32 "
    "round_even.f32 round_away.f32 round_bf16.f32 round_f16.f32 is_finite.f32 "
    "eq.f32 ne.f32 lt.f32 le.f32 "
    "add.i32 sub.i32 mul.i32 div.i32 rem.i32 max.i32 min.i32 neg.i32 abs.i32 sign.i32 "
    "and.i32 or.i32 xor.i32 not.i32 shl.i32 shra.i32 shrl.i32 "
    "eq.i32 ne.i32 lt.i32 le.i32 "
    "and.bool or.bool xor.bool not.bool select "
    "i32_to_f32 f32_to_i32 bool_to_f32 bool_to_i32 bits_f32_to_i32 bits_i32_to_f32"
).split()

_COMMUTATIVE = {
    f"{name}.{kind}"
    for name in ("add", "mul", "and", "or", "xor", "eq", "ne")
    for kind in (F32, I32, BOOL)
} | {"max.i32", "min.i32"}
# What JAX puts between two types of a scalar that say different things about a mesh.
_BETWEEN_TYPES = ("reshard", "reduce_sum")
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Node:
    """One value: `op(args)`; `data` holds a constant, an input's name or a load's
    capture."""

    op: str
    type: str
    args: tuple[int, ...] = ()
    data: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A finished program.

    Attributes:
        kind: "score" or "mask".
        nodes: the values in order; arguments are earlier positions.
        result: position of the result.
        dscore: position of the derivative with respect to the score, or None.
        load_grads: (position of a float load, position of its gradient).
    """

    kind: str
    nodes: tuple[Node, ...]
    result: int
    dscore: int | None = None
    load_grads: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """The canonical text."""
        lines = [f"{self.kind}({', '.join(_trace.INPUTS[self.kind])})"]
        for k, node in enumerate(self.nodes):
            args = ", ".join(f"%{a}" for a in node.args)
            if node.op == "load":
                capture, shape, dtype = node.data
                body = (
                    f"load.{node.type} capture{capture}:{dtype}{list(shape)} [{args}]"
                )
            elif node.op == "const":
                body = f"const.{node.type} {_show(node.type, node.data)}"
            elif node.op == "input":
                body = f"input.{node.type} {node.data}"
            else:
                body = f"{node.op} {args}"
            lines.append(f"%{k} = {body}")
        lines.append(f"result %{self.result}")
        if self.dscore is not None:
            lines.append(f"dscore %{self.dscore}")
        lines += [f"dload %{load} = %{grad}" for load, grad in self.load_grads]
        return "\n".join(lines)

    def uses(self, name: str) -> bool:
        """True if the program reads the input `name`."""
        return any(n.op == "input" and n.data == name for n in self.nodes)

    def with_captures_from(self, first: int) -> "Program":
        """The program with its captures renumbered."""
        nodes = tuple(
            dataclasses.replace(n, data=(n.data[0] + first, *n.data[1:]))
            if n.op == "load"
            else n
            for n in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes)

    def forward(self) -> "Program":
        """The program without its derivative."""
        return _finish(self.kind, self.nodes, self.result)


def compile_program(traced: _trace.TracedFunction, function: Any) -> Program:
    """Compile a traced mod, its derivative included; raise `Unsupported` naming a
    primitive and a line."""
    if traced.scalar is None:
        raise _trace.Unsupported(str(traced.unsupported))
    try:
        return _compile(traced)
    except _trace.Unsupported as e:
        raise _trace.with_line(e, traced.closed.jaxpr, function) from None


# --- private -------------------------------------------------------------------------


def _compile(traced: _trace.TracedFunction) -> Program:
    emitter = _Emitter()
    inputs = [
        emitter.emit("input", I32 if name != "score" else F32, data=name)
        for name in _trace.INPUTS[traced.kind]
    ]
    loads: list[int] = []

    def on_load(number: int, load: _trace.Load, indices: list[int]) -> int:
        loads.append(emitter.load(load, indices))
        return loads[-1]

    (out,) = emitter.run(traced.scalar, inputs, on_load)
    if traced.kind == "mask":
        return _finish("mask", emitter.nodes, out)
    ct = emitter.emit("input", F32, data="ct")
    derivative = _trace.derivative_jaxpr(traced)
    grads = emitter.run(derivative, [*inputs, *loads, ct], None)
    float_loads = [k for k, x in enumerate(traced.loads) if x.is_float]
    # Reads of one element are one load, whose gradient is the sum of theirs.
    of_load: dict[int, int] = {}
    for k, grad in zip(float_loads, grads[1:], strict=True):
        load = loads[k]
        if load in of_load:
            grad = emitter.emit("add.f32", F32, of_load[load], grad)
        of_load[load] = grad
    return _finish("score", emitter.nodes, out, grads[0], tuple(of_load.items()))


def _show(kind: str, value: Any) -> str:
    return float(value).hex() if kind == F32 else str(value)


def _finish(
    kind: str,
    nodes: Sequence[Node],
    result: int,
    dscore: int | None = None,
    load_grads: Sequence[tuple[int, int]] = (),
) -> Program:
    """Keep what the results need and number it anew, in order."""
    pairs = [p for p in load_grads if not _is_zero(nodes[p[1]])]
    roots = [
        result,
        *([] if dscore is None else [dscore]),
        *(i for p in pairs for i in p),
    ]
    needed: set[int] = set()
    stack = list(roots)
    while stack:
        k = stack.pop()
        if k not in needed:
            needed.add(k)
            stack.extend(nodes[k].args)
    number = {old: new for new, old in enumerate(sorted(needed))}
    kept = tuple(
        dataclasses.replace(nodes[old], args=tuple(number[a] for a in nodes[old].args))
        for old in sorted(needed)
    )
    return Program(
        kind,
        kept,
        number[result],
        None if dscore is None else number[dscore],
        tuple((number[a], number[b]) for a, b in pairs),
    )


def _is_zero(node: Node) -> bool:
    return node.op == "const" and node.data == 0


def _type_of(dtype: Any) -> str:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return BOOL
    if jnp.issubdtype(dtype, jnp.floating):
        return F32
    if jnp.issubdtype(dtype, jnp.integer):
        return I32
    raise _trace.Unsupported(f"values of dtype {dtype}")


def _constant(kind: str, value: Any) -> Any:
    """A Python value that is the constant exactly, hashable, NaN included."""
    if kind == F32:
        return _Float(np.float32(value))
    return bool(value) if kind == BOOL else int(np.int64(value).astype(np.int32))


class _Float(float):
    """A float32 constant that compares by its bits, so that -0.0, 0.0 and NaN are told
    apart."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Float):
            return np.float32(self).tobytes() == np.float32(other).tobytes()
        return float(self) == other

    def __hash__(self) -> int:
        return hash(np.float32(self).tobytes())


class _Emitter:
    """Builds nodes; equal nodes are one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._index: dict[Node, int] = {}
        self._range: list[tuple[int, int]] = []  # of i32 values

    # -- building

    def emit(self, op: str, kind: str, *args: int, data: Any = None) -> int:
        if op in _COMMUTATIVE and args[0] > args[1]:
            args = (args[1], args[0], *args[2:])
        folded = self._simplify(op, kind, args)
        if folded is not None:
            return folded
        node = Node(op, kind, tuple(args), data)
        if node not in self._index:
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            self._range.append(self._range_of(node))
        return self._index[node]

    def const(self, kind: str, value: Any) -> int:
        return self.emit("const", kind, data=_constant(kind, value))

    def load(self, load: _trace.Load, indices: list[int]) -> int:
        args = []
        for index, size in zip(indices, load.shape, strict=True):
            # Loads clamp, so a clamp to exactly the axis in front of one is dead.
            args.append(self._without_clamp(index, size))
        if load.dtype.kind in "iu" and load.dtype.itemsize > 4:
            raise _trace.Unsupported(
                f"an array of {load.dtype}; convert it to int32 outside the mod"
            )
        data = (load.capture, load.shape, str(load.dtype))
        return self.emit("load", _type_of(load.dtype), *args, data=data)

    def _without_clamp(self, index: int, size: int) -> int:
        low, high = self.const(I32, 0), self.const(I32, size - 1)
        for op, bound in (("max.i32", low), ("min.i32", high), ("max.i32", low)):
            node = self.nodes[index]
            if node.op == op and bound in node.args:
                index = node.args[0] if node.args[1] == bound else node.args[1]
        return index

    # -- simplification

    def _simplify(self, op: str, kind: str, args: tuple[int, ...]) -> int | None:
        if op in ("const", "input", "load"):
            return None
        nodes = [self.nodes[a] for a in args]
        if all(n.op == "const" for n in nodes) and op in _FOLD:
            with np.errstate(all="ignore"):
                return self.const(kind, _FOLD[op](*(_np(n) for n in nodes)))
        is_const = [n.data if n.op == "const" else None for n in nodes]
        if op == "select":
            if is_const[0] is not None:
                return args[1] if is_const[0] else args[2]
            if args[1] == args[2]:
                return args[1]
        elif op == "add.i32" and 0 in is_const:
            return args[1 - is_const.index(0)]
        elif op == "sub.i32" and is_const[1] == 0:
            return args[0]
        elif op in ("mul.i32", "mul.f32") and 1 in is_const:
            return args[1 - is_const.index(1)]  # exact in floating point too
        elif op == "div.f32" and is_const[1] == 1:
            return args[0]
        elif op in ("and.bool", "or.bool"):
            for a, value in enumerate(is_const):
                if value is not None:
                    return args[1 - a] if value == (op == "and.bool") else args[a]
            if args[0] == args[1]:
                return args[0]
        elif op == "not.bool" and nodes[0].op == "not.bool":
            return nodes[0].args[0]
        elif op in ("lt.i32", "le.i32", "max.i32", "min.i32"):
            return self._decide(op, args)
        return None

    def _decide(self, op: str, args: tuple[int, ...]) -> int | None:
        (a_low, a_high), (b_low, b_high) = (self._range[a] for a in args)
        if op == "lt.i32":
            if a_high < b_low:
                return self.const(BOOL, True)
            return self.const(BOOL, False) if a_low >= b_high else None
        if op == "le.i32":
            if a_high <= b_low:
                return self.const(BOOL, True)
            return self.const(BOOL, False) if a_low > b_high else None
        larger = args[0] if a_low >= b_high else args[1] if b_low >= a_high else None
        if larger is None:
            return None
        return larger if op == "max.i32" else args[0] if larger == args[1] else args[1]

    def _range_of(self, node: Node) -> tuple[int, int]:
        """Bounds of an i32 value that hold for every index; they decide comparisons."""
        low, high = _INT_MIN, _INT_MAX
        if node.type != I32:
            return low, high
        ranges = [self._range[a] for a in node.args]
        if node.op == "const":
            return node.data, node.data
        if node.op == "input" and node.data in ("b", "h"):
            low = 0
        elif node.op == "max.i32":
            low, high = max(r[0] for r in ranges), max(r[1] for r in ranges)
        elif node.op == "min.i32":
            low, high = min(r[0] for r in ranges), min(r[1] for r in ranges)
        elif node.op in ("add.i32", "sub.i32"):
            (a, b), (c, d) = ranges
            bounds = (a + c, b + d) if node.op == "add.i32" else (a - d, b - c)
            if bounds[0] >= _INT_MIN and bounds[1] <= _INT_MAX:
                low, high = bounds
        elif node.op == "select":
            low = min(ranges[1][0], ranges[2][0])
            high = max(ranges[1][1], ranges[2][1])
        elif node.op == "bool_to_i32":
            low, high = 0, 1
        return low, high

    # -- jaxprs

    def run(
        self,
        closed: Any,
        args: Sequence[int],
        on_load: Callable[[int, _trace.Load, list[int]], int] | None,
    ) -> list[int]:
        jaxpr = getattr(closed, "jaxpr", closed)
        consts = getattr(closed, "consts", ())
        env: dict[Any, int] = {}
        for v, c in zip(jaxpr.constvars, consts, strict=True):
            env[v] = self._literal(c, v.aval)
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> int:
            return (
                self._literal(v.val, v.aval)
                if isinstance(v, jex_core.Literal)
                else env[v]
            )

        number = 0
        for eqn in jaxpr.eqns:
            xs = [read(v) for v in eqn.invars]
            if eqn.primitive is _trace.load_p:
                assert on_load is not None
                p = eqn.params
                load = _trace.Load(p["capture"], p["shape"], np.dtype(p["dtype"]))
                outs = [on_load(number, load, xs)]
                number += 1
            else:
                outs = self._equation(eqn, xs)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _literal(self, value: Any, aval: Any) -> int:
        if np.ndim(value):
            raise _trace.Unsupported("a constant array inside a mod")
        number, dtype = np.asarray(value).item(), np.dtype(aval.dtype)
        is_wide = dtype.kind in "iu" and dtype.itemsize > 4
        if is_wide and not _INT_MIN <= number <= _INT_MAX:
            raise _trace.Unsupported(
                f"the {dtype} {number}; integers in a program are int32"
            )
        return self.const(_type_of(dtype), number)

    def _equation(self, eqn: Any, xs: list[int]) -> list[int]:
        name, p = eqn.primitive.name, eqn.params
        if name in _BETWEEN_TYPES and not eqn.invars[0].aval.shape:
            return xs
        if name in _trace.BODY_PARAM:
            return self.run(p[_trace.BODY_PARAM[name]], xs, None)
        if name in _trace.CUSTOM_RULE:
            body = p.get("call_jaxpr", p.get("fun_jaxpr"))
            return self.run(body, xs, None)
        if name == "cond":
            return self._cond(p["branches"], xs)
        out = eqn.outvars[0].aval
        if out.shape:
            raise _trace.Unsupported(f"the primitive `{name}` on arrays", name)
        if name in ("empty", "empty2"):  # the unused cotangents of a cond
            return [self.const(_type_of(out.dtype), 0)]
        if name == "convert_element_type":
            return [self._convert(xs[0], eqn.invars[0].aval.dtype, out.dtype)]
        if name not in _EMIT:
            raise _trace.Unsupported(f"the primitive `{name}`", name)
        operand = eqn.invars[-1].aval.dtype
        _check_integer_width(name, operand)
        value = _EMIT[name](self, [_type_of(v.aval.dtype) for v in eqn.invars], xs, p)
        return [self._rounded(value, out.dtype)]

    def _rounded(self, value: int, dtype: Any) -> int:
        """Arithmetic that JAX does in bfloat16 or float16 rounds after each
        operation."""
        if dtype == jnp.bfloat16:
            return self.emit("round_bf16.f32", F32, value)
        if dtype == jnp.float16:
            return self.emit("round_f16.f32", F32, value)
        return value

    def _convert(self, x: int, old: Any, new: Any) -> int:
        a, b = _type_of(old), _type_of(new)
        if b == I32 and np.dtype(new).itemsize < 4:
            raise _trace.Unsupported(
                f"a conversion to {np.dtype(new)}", "convert_element_type"
            )
        # An int32 holds the bits of a wide unsigned integer, not its value.
        old, new = np.dtype(old), np.dtype(new)
        for one, other in ((old, new), (new, old)):
            is_wide = one.kind == "u" and one.itemsize >= 4
            if is_wide and (other.kind not in "iub" or other.itemsize > 4):
                raise _trace.Unsupported(
                    f"a conversion from {old} to {new} (go through int32)",
                    "convert_element_type",
                )
        if b == BOOL and a != BOOL:
            return self.emit(f"ne.{a}", BOOL, x, self.const(a, 0))
        if a != b:
            x = self.emit(f"{a}_to_{b}", b, x)
        return self._rounded(x, new) if b == F32 else x

    def _cond(self, branches: Any, xs: list[int]) -> list[int]:
        """All branches, then a select: an index outside the branches is clamped, as in
        XLA."""
        results = [self.run(branch, xs[1:], None) for branch in branches]
        index = xs[0]
        if self.nodes[index].type == BOOL:
            index = self.emit("bool_to_i32", I32, index)
        out = results[0]
        for k in range(1, len(results)):
            pred = self.emit("le.i32", BOOL, self.const(I32, k), index)
            out = [
                self._select(pred, new, old)
                for new, old in zip(results[k], out, strict=True)
            ]
        return out

    def _select(self, pred: int, yes: int, no: int) -> int:
        return self.emit("select", self.nodes[yes].type, pred, yes, no)


def _check_integer_width(name: str, dtype: Any) -> None:
    dtype = np.dtype(dtype)
    if (
        dtype.kind in "iu"
        and dtype not in (np.int32, np.int64)
        and name not in ("copy",)
    ):
        raise _trace.Unsupported(
            f"arithmetic (`{name}`) on {dtype}; convert to int32 first"
        )
    if dtype == np.int64 and name in ("mul", "shift_left", "integer_pow", "square"):
        raise _trace.Unsupported(
            f"`{name}` of {dtype}, which may leave int32; convert to int32 first"
        )


def _np(node: Node) -> Any:
    return {F32: np.float32, I32: np.int32, BOOL: np.bool_}[node.type](node.data)


_ON_NUMBERS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
}

_FOLD: dict[str, Callable[..., Any]] = {
    "select": lambda c, a, b: a if c else b,
    "not.bool": np.logical_not,
    "i32_to_f32": np.float32,
    "bool_to_f32": np.float32,
    "bool_to_i32": np.int32,
    "neg.f32": np.negative,
    "neg.i32": np.negative,
    "div.f32": np.divide,
    "sqrt.f32": np.sqrt,
    "and.bool": np.logical_and,
    "or.bool": np.logical_or,
    "xor.bool": np.logical_xor,
    **{f"{name}.{k}": f for name, f in _ON_NUMBERS.items() for k in (F32, I32)},
}


# --- primitives: each entry takes (emitter, operand types, operands, parameters) and
# returns a value


def _arith(name: str, bools: str | None = None) -> Callable[..., int]:
    def build(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
        kind = types[0]
        if kind == BOOL:
            if bools is None:
                raise _trace.Unsupported(f"`{name}` of bools")
            return e.emit(f"{bools}.bool", BOOL, *xs)
        return e.emit(f"{name}.{kind}", kind, *xs)

    return build


def _only(op: str, kind: str) -> Callable[..., int]:
    def build(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
        if types[0] != kind:
            raise _trace.Unsupported(f"`{op.split('.')[0]}` of {types[0]}")
        return e.emit(op, kind, *xs)

    return build


def _compare(name: str, swap: bool = False) -> Callable[..., int]:
    def build(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
        a, b = xs[::-1] if swap else xs
        if types[0] == BOOL:
            if name not in ("eq", "ne"):
                a, b = e.emit("bool_to_i32", I32, a), e.emit("bool_to_i32", I32, b)
                return e.emit(f"{name}.i32", BOOL, a, b)
            x = e.emit("xor.bool", BOOL, a, b)
            return x if name == "ne" else e.emit("not.bool", BOOL, x)
        return e.emit(f"{name}.{types[0]}", BOOL, a, b)

    return build


def _logical(name: str) -> Callable[..., int]:
    def build(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
        return e.emit(f"{name}.{types[0]}", types[0], *xs)

    return build


def _identity(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    return xs[0]


def _select_n(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    which, *cases = xs
    if types[0] == BOOL:
        return e._select(which, cases[1], cases[0])
    out = cases[0]
    for k in range(1, len(cases)):
        out = e._select(e.emit("le.i32", BOOL, e.const(I32, k), which), cases[k], out)
    return out


def _clamp(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    low, x, high = xs
    k = types[1]
    return e.emit(f"min.{k}", k, e.emit(f"max.{k}", k, x, low), high)


def _integer_pow(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    kind, n = types[0], abs(p["y"])
    if n == 0:
        return e.const(kind, 1)
    base, out = xs[0], None
    while n:
        if n & 1:
            out = base if out is None else e.emit(f"mul.{kind}", kind, out, base)
        n >>= 1
        if n:
            base = e.emit(f"mul.{kind}", kind, base, base)
    assert out is not None
    return out if p["y"] > 0 else e.emit(f"div.{kind}", kind, e.const(kind, 1), out)


def _square(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    return _integer_pow(e, types, xs, {"y": 2})


def _one_minus_square(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    return e.emit("sub.f32", F32, e.const(F32, 1), _square(e, types, xs, p))


def _pow(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    y = xs[1] if types[1] == F32 else e.emit("i32_to_f32", F32, xs[1])
    if types[0] != F32:
        raise _trace.Unsupported("`pow` of integers")
    return e.emit("pow.f32", F32, xs[0], y)


def _logistic(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    one = e.const(F32, 1)
    down = e.emit("exp.f32", F32, e.emit("neg.f32", F32, xs[0]))
    return e.emit("div.f32", F32, one, e.emit("add.f32", F32, one, down))


def _round(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    even = p["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return e.emit("round_even.f32" if even else "round_away.f32", F32, xs[0])


def _reduce_precision(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    bits = (p["exponent_bits"], p["mantissa_bits"])
    if bits == (8, 23):
        return xs[0]
    names = {(8, 7): "round_bf16.f32", (5, 10): "round_f16.f32"}
    if bits not in names:
        raise _trace.Unsupported(f"`reduce_precision` to {bits[0]} + {bits[1]} bits")
    return e.emit(names[bits], F32, xs[0])


def _is_finite(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    return e.emit("is_finite.f32", BOOL, xs[0])


def _atan(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    return e.emit("atan2.f32", F32, xs[0], e.const(F32, 1))


def _bitcast(e: _Emitter, types: list[str], xs: list[int], p: Any) -> int:
    new = np.dtype(p["new_dtype"])
    if types[0] == F32 and new == np.int32:
        return e.emit("bits_f32_to_i32", I32, xs[0])
    if types[0] == I32 and new == np.float32:
        return e.emit("bits_i32_to_f32", F32, xs[0])
    raise _trace.Unsupported(f"`bitcast_convert_type` to {new}")


_EMIT: dict[str, Callable[[_Emitter, list[str], list[int], Any], int]] = {
    "add": _arith("add", "or"),
    "add_any": _arith("add"),
    "sub": _arith("sub"),
    "mul": _arith("mul", "and"),
    "div": _arith("div"),
    "rem": _arith("rem"),
    "max": _arith("max", "or"),
    "min": _arith("min", "and"),
    "neg": _arith("neg"),
    "abs": _arith("abs"),
    "sign": _arith("sign"),
    "pow": _pow,
    "integer_pow": _integer_pow,
    "square": _square,
    "one_minus_square": _one_minus_square,
    "sqrt": _only("sqrt.f32", F32),
    "rsqrt": _only("rsqrt.f32", F32),
    "exp": _only("exp.f32", F32),
    "exp2": _only("exp2.f32", F32),
    "expm1": _only("expm1.f32", F32),
    "log": _only("log.f32", F32),
    "log1p": _only("log1p.f32", F32),
    "tanh": _only("tanh.f32", F32),
    "logistic": _logistic,
    "sin": _only("sin.f32", F32),
    "cos": _only("cos.f32", F32),
    "tan": _only("tan.f32", F32),
    "atan": _atan,
    "atan2": _only("atan2.f32", F32),
    "erf": _only("erf.f32", F32),
    "floor": _only("floor.f32", F32),
    "ceil": _only("ceil.f32", F32),
    "round": _round,
    "is_finite": _is_finite,
    "reduce_precision": _reduce_precision,
    "eq": _compare("eq"),
    "ne": _compare("ne"),
    "lt": _compare("lt"),
    "le": _compare("le"),
    "gt": _compare("lt", swap=True),
    "ge": _compare("le", swap=True),
    "and": _logical("and"),
    "or": _logical("or"),
    "xor": _logical("xor"),
    "not": _logical("not"),
    "shift_left": _only("shl.i32", I32),
    "shift_right_arithmetic": _only("shra.i32", I32),
    "shift_right_logical": _only("shrl.i32", I32),
    "select_n": _select_n,
    "clamp": _clamp,
    "bitcast_convert_type": _bitcast,
    "copy": _identity,
    "copy_p": _identity,
    "stop_gradient": _identity,
    "optimization_barrier": _identity,
    "reshape": _identity,
    "squeeze": _identity,
    "broadcast_in_dim": _identity,
}

# The primitives of which programs are made, for the documentation.
SUPPORTED_PRIMITIVES = tuple(
    sorted(
        [
            *_EMIT,
            "convert_element_type",
            "cond",
            "empty",
            "empty2",
            *_trace.BODY_PARAM,
            *_trace.CUSTOM_RULE,
        ]
    )
)
