"""Print programs as functors for the CUDA kernels (docs/cuda.md, section 2).

The same typed SSA program that the CPU interprets becomes a C++ struct here: one
statement per value, each in the earliest function that can compute it.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _runs
from ._program import BOOL, F32, I32, Node, Program

HEAD, ROW, ELEMENT = range(3)
_STAGE_OF_INPUT = {
    "b": HEAD,
    "h": HEAD,
    "q": ROW,
    "kv": ELEMENT,
    "score": ELEMENT,
    "ct": ELEMENT,
}
_PARAMETER = {"q": "q_idx", "kv": "kv_idx"}
_PLACE = {HEAD: "head", ROW: "row"}
_C_TYPE = {F32: "float", I32: "int", BOOL: "bool"}
CAPTURE_TYPES = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "fkl::CaptureBf16",
    "float16": "fkl::CaptureF16",
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
}

# C++ of the operations on operands {0}, {1}, {2}; functions are in attention/mods.cuh.
_EXPRESSION = {
    "add.f32": "{0} + {1}",
    "sub.f32": "{0} - {1}",
    "mul.f32": "{0} * {1}",
    "div.f32": "fkl::div_f32({0}, {1})",
    "rem.f32": "fmodf({0}, {1})",
    "max.f32": "fkl::max_f32({0}, {1})",
    "min.f32": "fkl::min_f32({0}, {1})",
    "pow.f32": "powf({0}, {1})",
    "atan2.f32": "atan2f({0}, {1})",
    "fma.f32": "fmaf({0}, {1}, {2})",
    "neg.f32": "-{0}",
    "abs.f32": "fabsf({0})",
    "sign.f32": "fkl::sign_f32({0})",
    "sqrt.f32": "fkl::sqrt_f32({0})",
    "rsqrt.f32": "rsqrtf({0})",
    "exp.f32": "expf({0})",
    "exp2.f32": "exp2f({0})",
    "expm1.f32": "expm1f({0})",
    "log.f32": "logf({0})",
    "log1p.f32": "log1pf({0})",
    "tanh.f32": "fkl::tanh_f32({0})",
    "sin.f32": "fkl::sin_f32({0})",
    "cos.f32": "fkl::cos_f32({0})",
    "tan.f32": "fkl::tan_f32({0})",
    "erf.f32": "erff({0})",
    "floor.f32": "floorf({0})",
    "ceil.f32": "ceilf({0})",
    "round_even.f32": "rintf({0})",
    "round_away.f32": "roundf({0})",
    "round_bf16.f32": "fkl::round_bf16({0})",
    "round_f16.f32": "fkl::round_f16({0})",
    "is_finite.f32": "fkl::is_finite({0})",
    **{
        f"{name}.{kind}": f"{{0}} {sign} {{1}}"
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="))
        for kind in (F32, I32)
    },
    **{
        f"{name}.i32": f"fkl::{name}_i32({{0}}, {{1}})"
        for name in ("add", "sub", "mul", "div", "rem", "max", "min")
    },
    **{f"{name}.i32": f"fkl::{name}_i32({{0}})" for name in ("neg", "abs", "sign")},
    "and.i32": "{0} & {1}",
    "or.i32": "{0} | {1}",
    "xor.i32": "{0} ^ {1}",
    "not.i32": "~{0}",
    **{f"{n}.i32": f"fkl::{n}_i32({{0}}, {{1}})" for n in ("shl", "shra", "shrl")},
    # Not && and ||: both operands are there already, and a branch is dearer.
    "and.bool": "bool({0} & {1})",
    "or.bool": "bool({0} | {1})",
    "xor.bool": "{0} != {1}",
    "not.bool": "!{0}",
    "select": "{0} ? {1} : {2}",
    "i32_to_f32": "static_cast<float>({0})",
    "f32_to_i32": "fkl::f32_to_i32({0})",
    "bool_to_f32": "{0} ? 1.0f : 0.0f",
    "bool_to_i32": "{0} ? 1 : 0",
    "bits_f32_to_i32": "__float_as_int({0})",
    "bits_i32_to_f32": "__int_as_float({0})",
}


def functor(name: str, program: Program | None, results: Sequence[str]) -> list[str]:
    """Return the lines of the functor of a program, without one of `NoScoreMod` or
    `NoMaskMod`; `results` are the roles whose gradients a backward call wants."""
    if program is None:
        return [f"using {name} = fkl::No{name};"]
    return [
        f'#line 1 "{program.kind} program"',
        *Functor(name, program, results).lines(),
    ]


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """A gradient of one load: its name, which value it is, when it can be added."""

    name: str
    load: int
    value: int
    stage: int


class Functor:
    """Prints one program as a struct (docs/cuda.md, section 2).

    Values that depend on the head or on the row only are members of `Head` and `Row`;
    gradients of what is read once per head or row are members of `HeadGrads` and
    `RowGrads`.
    """

    def __init__(self, name: str, program: Program, results: Sequence[str]):
        self.name = name
        self.program = program
        self.nodes = program.nodes
        self.stage = _stages(self.nodes)
        self.is_backward = program.dscore is not None
        self.grads = [
            _Gradient(f"g{k}", load, value, self._load_stage(self.nodes[load]))
            for k, (load, value) in enumerate(program.load_grads)
            if f"capture.{self.nodes[load].data[0]}" in results
            and 0 not in self.nodes[load].data[1]  # no element, nothing to add
        ]
        self.reciprocals = {
            node.args[1]
            for k, node in enumerate(self.nodes)
            if node.op == "div.f32" and self._divides_early(k)
        }
        self.members = self._members()

    def lines(self) -> list[str]:
        """The struct."""
        lines = [
            f"struct {self.name} {{",
            "  static constexpr bool kIsIdentity = false, kReadsRow = "
            f"{str(ROW in self.stage).lower()};",
            self._struct("Head", self._member_lines(HEAD)),
            self._struct("Row", self._member_lines(ROW)),
        ]
        if self.is_backward:
            for stage, kind in ((HEAD, "HeadGrads"), (ROW, "RowGrads")):
                mine = [f"float {g.name};" for g in self.grads if g.stage == stage]
                if stage == HEAD:
                    mine += [self._pending(g) for g in self.grads if g.stage == ELEMENT]
                lines.append(self._struct(kind, mine))
        captures = {
            n.data[0]: CAPTURE_TYPES[n.data[2]] for n in self.nodes if n.op == "load"
        }
        lines += [f"  const {t}* capture{k};" for k, t in sorted(captures.items())]
        bound = ", ".join(
            f"fkl::at_outer<const {t}>(params.captures[{k}], outer)"
            for k, t in sorted(captures.items())
        )
        lines += [
            f"  static FKL_DEVICE {self.name} bind(const fkl::CommonParams& params, "
            "const fkl::OuterIndex& outer) {",
            f"    return {{{bound}}};",
            "  }",
            *self._bind("Head bind_head(int b, int h)", HEAD),
            *self._bind("Row bind_row(const Head& head, int q_idx)", ROW),
        ]
        if self.program.kind == "mask":
            lines += self._function(
                "bool live(const Head& head, const Row& row, int kv_idx)",
                self._body([self.program.result]),
                self._value(self.program.result, ELEMENT),
            )
            lines += self._classify()
        else:
            lines += self._function(
                "float score(const Head& head, const Row& row, float score, "
                "int kv_idx)",
                self._body([self.program.result]),
                self._value(self.program.result, ELEMENT),
            )
            run = _runs.QueryRun if self.is_backward else _runs.Run
            lines += run(self).lines()
        if self.is_backward:
            lines += self._derivative()
            lines += self._flush()
        return [*lines, "};"]

    # -- for runs of keys

    def value(self, k: int) -> str:
        """How code per score names a value."""
        return self._value(k, ELEMENT)

    def inverse(self, k: int) -> str | None:
        """What a quotient multiplies its dividend with, if that is known early."""
        divisor = self.nodes[k].args[1]
        if self._divides_early(k):
            return f"{_PLACE[self.stage[divisor]]}.r{divisor}"
        inverse = _exact_enough_inverse(self.nodes[divisor])
        return None if inverse is None else _literal(F32, inverse)

    def statements(self, roots: Iterable[int]) -> list[str]:
        """The statements per score that the roots need, in order."""
        return self._body(roots)

    def expression(self, k: int) -> str:
        """The operation of a value per score."""
        return self._expression(k, ELEMENT)

    def c_type(self, k: int) -> str:
        """The C++ type of a value."""
        return _C_TYPE[self.nodes[k].type]

    # -- stages

    def _load_stage(self, node: Node) -> int:
        return max((self.stage[a] for a in node.args), default=HEAD)

    def _divides_early(self, k: int) -> bool:
        """A divisor that is known before the quotient is asked for: then the quotient
        is a product with its reciprocal."""
        divisor = self.nodes[k].args[1]
        return self.nodes[divisor].op != "const" and self.stage[divisor] < self.stage[k]

    def _members(self) -> set[int]:
        """Values that are read in a later stage than their own."""
        read = {self.program.result}
        if self.program.dscore is not None:
            read.add(self.program.dscore)
        for g in self.grads:
            read |= {g.value, *self.nodes[g.load].args}
        for k, node in enumerate(self.nodes):
            for position, a in enumerate(node.args):
                by_reciprocal = position == 1 and node.op == "div.f32"
                if self.stage[a] < self.stage[k] and not (
                    by_reciprocal and self._divides_early(k)
                ):
                    read.add(a)
        if self.program.kind == "mask":  # classify looks at every divisor itself
            read |= {a for a in self.reciprocals if self.stage[a] == HEAD}
        return {
            k for k in read if self.nodes[k].op != "const" and self.stage[k] < ELEMENT
        }

    def _member_lines(self, stage: int) -> list[str]:
        mine = [k for k in sorted(self.members) if self.stage[k] == stage]
        inverse = [k for k in sorted(self.reciprocals) if self.stage[k] == stage]
        return [
            *(f"{_C_TYPE[self.nodes[k].type]} v{k};" for k in mine),
            *(f"float r{k};" for k in inverse),
        ]

    # -- functions

    @staticmethod
    def _struct(name: str, members: list[str]) -> str:
        return f"  struct {name} {{{''.join(f' {m}' for m in members)} }};"

    @staticmethod
    def _function(signature: str, body: list[str], result: str) -> list[str]:
        return [
            f"  FKL_DEVICE {signature} const {{",
            *body,
            f"    return {result};",
            "  }",
        ]

    def _bind(self, signature: str, stage: int) -> list[str]:
        mine = [k for k in sorted(self.members) if self.stage[k] == stage]
        inverse = [k for k in sorted(self.reciprocals) if self.stage[k] == stage]
        values = [
            *(self._value(k, stage) for k in mine),
            *(f"fkl::div_f32(1.0f, {self._value(k, stage)})" for k in inverse),
        ]
        body = self._body([*mine, *inverse], stage)
        return self._function(signature, body, f"{{{', '.join(values)}}}")

    def _body(self, roots: Iterable[int], stage: int = ELEMENT) -> list[str]:
        """The statements of one stage that the roots need, in order."""
        needed: set[int] = set()
        stack = list(roots)
        while stack:
            k = stack.pop()
            if self.stage[k] == stage and k not in needed:
                needed.add(k)
                stack.extend(self.nodes[k].args)
        return [
            f"    const {_C_TYPE[self.nodes[k].type]} v{k} = "
            f"{self._expression(k, stage)};"
            for k in sorted(needed)
            if self.nodes[k].op not in ("const", "input")
        ]

    def _value(self, k: int, stage: int) -> str:
        """How code of a stage names a value."""
        node = self.nodes[k]
        if node.op == "const":
            return _literal(node.type, node.data)
        if self.stage[k] < stage:
            return f"{_PLACE[self.stage[k]]}.v{k}"
        if node.op == "input":
            return _PARAMETER.get(node.data, node.data)
        return f"v{k}"

    def _expression(self, k: int, stage: int) -> str:
        node = self.nodes[k]
        if node.op == "load":
            if 0 in node.data[1]:
                return _literal(node.type, 0)
            return (
                f"fkl::read_element(capture{node.data[0]} + {self._offset(k, stage)})"
            )
        if node.op == "div.f32":
            a, b = node.args
            if self._divides_early(k):
                place = _PLACE[self.stage[b]]
                return f"{self._value(a, stage)} * {place}.r{b}"
            inverse = _exact_enough_inverse(self.nodes[b])
            if inverse is not None:
                return f"{self._value(a, stage)} * {_literal(F32, inverse)}"
        return _EXPRESSION[node.op].format(*(self._value(a, stage) for a in node.args))

    def _offset(self, load: int, stage: int) -> str:
        """Of an element of a captured array; every index is clamped to its axis."""
        node = self.nodes[load]
        _, shape, _ = node.data
        wide = "static_cast<long long>({})" if self._is_wide(load) else "{}"
        terms, stride = [], math.prod(shape)
        for a, length in zip(node.args, shape, strict=True):
            stride //= length
            if length == 1:
                continue
            index = self.nodes[a]
            if index.op == "const":
                term = str(min(max(index.data, 0), length - 1))
            else:
                term = f"fkl::clamp_index({self._value(a, stage)}, {length})"
            term = wide.format(term)
            terms.append(term if stride == 1 else f"{term} * {stride}")
        return " + ".join(terms) or "0"

    def _derivative(self) -> list[str]:
        dscore = self.program.dscore
        assert dscore is not None
        # The gradients also need the indices of the loads, if they are added here.
        indices = [i for g in self.grads for i in self.nodes[g.load].args]
        body = self._body([dscore, *indices, *(g.value for g in self.grads)])
        body.append("    const bool is_dead = ct == 0.0f;")
        for g in self.grads:
            value = f"is_dead ? 0.0f : {self._value(g.value, ELEMENT)}"
            if g.stage < ELEMENT:
                body.append(f"    {_PLACE[g.stage]}_grads.{g.name} += {value};")
            else:
                capture = self.nodes[g.load].data[0]
                where = self._offset(g.load, ELEMENT)
                body.append(
                    f"    grads.add_later({capture}, head_grads.{g.name}, {where}, "
                    f"{value});"
                )
        return self._function(
            "float derivative(const Head& head, const Row& row, float score, "
            "int kv_idx, float ct,\n"
            "      const fkl::CaptureGrads& grads, HeadGrads& head_grads, "
            "RowGrads& row_grads)",
            body,
            f"is_dead ? 0.0f : {self._value(dscore, ELEMENT)}",
        )

    def _flush(self) -> list[str]:
        lines = []
        for stage, head, mask in (
            (
                ROW,
                "  template <int kLaneMask>\n  FKL_DEVICE void flush_row(",
                "kLaneMask",
            ),
            (HEAD, "  FKL_DEVICE void flush_head(", "31"),
        ):
            place = _PLACE[stage]
            row = "const Row& row, " if stage == ROW else ""
            lines.append(
                f"{head}const Head& head, {row}const fkl::CaptureGrads& grads, "
                f"{place.capitalize()}Grads& sums) const {{"
            )
            for g in self.grads:
                if g.stage == stage:
                    where = self._offset(g.load, ELEMENT)
                    capture = self.nodes[g.load].data[0]
                    lines.append(
                        f"    grads.add_sum<{mask}>({capture}, {where}, sums.{g.name});"
                    )
                elif g.stage == ELEMENT and stage == HEAD:
                    capture = self.nodes[g.load].data[0]
                    lines.append(f"    grads.flush({capture}, sums.{g.name});")
            lines += ["    sums = {};", "  }"]
        return lines

    def _pending(self, g: _Gradient) -> str:
        """Where a gradient that every score adds elsewhere waits. In the backward a
        lane owns two keys, whose elements come in turn."""
        kind = "long long" if self._is_wide(g.load) else "int"
        by_key = not self._reads(g.load, "q")
        return f"fkl::PendingGrad<{kind}> {g.name}{'[2]' if by_key else ''};"

    def _is_wide(self, load: int) -> bool:
        shape = self.nodes[load].data[1]
        return math.prod(shape) > np.iinfo(np.int32).max

    def _reads(self, k: int, name: str) -> bool:
        node = self.nodes[k]
        if node.op == "input":
            return bool(node.data == name)
        return any(self._reads(a, name) for a in node.args)

    # -- interval arithmetic

    def _classify(self) -> list[str]:
        body = ["    const fkl::Box box{q_first, q_last, kv_first, kv_last};"]
        body += [
            f"    const auto v{k} = {self._interval(k)};"
            for k, node in enumerate(self.nodes)
            if self.stage[k] > HEAD and node.op != "const"
        ]
        return self._function(
            "int classify(const Head& head, int q_first, int q_last, int kv_first, "
            "int kv_last)",
            body,
            f"{self._bounds(self.program.result)}.tile_state()",
        )

    def _bounds(self, k: int) -> str:
        if self.nodes[k].op == "const" or self.stage[k] == HEAD:
            return f"fkl::bounds_of({self._value(k, ELEMENT)})"
        return f"v{k}"

    def _interval(self, k: int) -> str:
        node = self.nodes[k]
        args = [self._bounds(a) for a in node.args]
        op, _, kind = node.op.partition(".")
        if node.op == "input":
            return f"fkl::interval_{node.data}(box)"
        if node.op == "load":
            if 0 in node.data[1]:
                return f"fkl::bounds_of({_literal(node.type, 0)})"
            sizes = ", ".join(map(str, node.data[1]))
            operands = ", ".join([f"capture{node.data[0]}", *args])
            return f"fkl::interval_load<{sizes}>({operands})"
        if node.op in _MONOTONE:
            ulps, domain = _MONOTONE[node.op]
            function = _EXPRESSION[node.op].format("x")
            return (
                f"fkl::monotone({args[0]}, {ulps}, {domain}, "
                f"[](float x) {{ return {function}; }})"
            )
        if node.op == "select":
            return f"fkl::interval_select(box, {', '.join(args)})"
        if node.op in ("bool_to_i32", "f32_to_i32", "bool_to_f32", "i32_to_f32"):
            return f"fkl::interval_{node.type}_of({args[0]})"
        if kind == I32 and (op in _INT_INTERVALS or op in _COMPARISONS):
            return f"fkl::interval_{op}({', '.join(['box', *args])})"
        if (kind == F32 and (op in _FLOAT_INTERVALS or op in _COMPARISONS)) or (
            kind == BOOL
        ):
            return f"fkl::interval_{op}({', '.join(args)})"
        return {F32: "fkl::any_float()", I32: "fkl::any_int()"}[node.type]


_COMPARISONS = ("eq", "ne", "lt", "le")
# fmt: off
_INT_INTERVALS = (
    "add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign",
    "and", "or", "xor", "not", "shl", "shra", "shrl",
)
_FLOAT_INTERVALS = (
    "add", "sub", "mul", "div", "fma", "max", "min", "neg", "abs", "is_finite",
)
_EXACT = ("floor", "ceil", "round_even", "round_away", "round_bf16", "round_f16")
# fmt: on
_EVERYWHERE, _LIBRARY = "-fkl::positive_infinity()", "fkl::kLibraryUlps"
# Non-decreasing functions: how far implementations differ, and above what they are.
_MONOTONE = {
    **{f"{name}.f32": ("0", _EVERYWHERE) for name in _EXACT},
    **{
        f"{name}.f32": (_LIBRARY, _EVERYWHERE)
        for name in ("exp", "exp2", "expm1", "tanh", "erf")
    },
    "sqrt.f32": (_LIBRARY, "0.0f"),
    "log.f32": (_LIBRARY, "0.0f"),
    "log1p.f32": (_LIBRARY, "-1.0f"),
}


def _stages(nodes: Sequence[Node]) -> list[int]:
    stages: list[int] = []
    for node in nodes:
        if node.op == "input":
            stages.append(_STAGE_OF_INPUT[node.data])
        else:
            stages.append(max((stages[a] for a in node.args), default=HEAD))
    return stages


def _exact_enough_inverse(divisor: Node) -> float | None:
    """The reciprocal of a constant, unless it would lose digits as a denormal."""
    if divisor.op != "const":
        return None
    value = np.float32(divisor.data)
    if not np.isfinite(value) or not 2.0**-120 < abs(value) < 2.0**120:
        return None
    return float(np.float32(1) / value)


def _literal(kind: str, value: Any) -> str:
    if kind == BOOL:
        return str(bool(value)).lower()
    if kind == I32:
        # The most negative number has no literal.
        return str(int(value)) if value != -(2**31) else "(-2147483647 - 1)"
    x = np.float32(value)
    if not np.isfinite(x):
        return f"__int_as_float({int(x.view(np.int32))})"
    return f"{x!s}f" if "." in str(x) or "e" in str(x) else f"{x!s}.0f"
