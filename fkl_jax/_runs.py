"""Score programs over a run of keys: what the softmax's exponent costs per score.

A lane of a kernel has the scores of one query row at keys whose distances from the
first are known when the kernel is compiled. Along such a *run* most programs are sums
of a few products: of the score (or of what a function that is not linear gives) with a
factor that is the same for all keys, of the distance with a slope, and of a start. They
take one multiply-add per summand, log2(e), the scale and the row's maximum included,
and no index is converted per score.

Nothing here knows a built-in mod: it looks at the program's operations only.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ._program import F32, Node

if TYPE_CHECKING:
    from ._functors import Functor

_LOG2E = "1.4426950408889634f"
_MINUS = "-1.0f"
_MAX_TERMS = 2
_MAX_INT_SLOPE = 2**16  # times the length of a run: far from what wraps at once
_LINEAR = ("add.f32", "sub.f32", "mul.f32", "div.f32", "neg.f32", "fma.f32")

# A factor is C++ text, None stands for 1.
Factor = str | None


@dataclasses.dataclass(frozen=True)
class _Form:
    """`sum(factor * atom) + slope * j + start`; the start is not kept, it is the value
    at j = 0 with all atoms 0."""

    terms: tuple[tuple[int, Factor], ...] = ()
    slope: str | None = None

    def times(self, factor: Factor) -> "_Form":
        if factor is None:
            return self
        slope = None if self.slope is None else _times(self.slope, factor)
        return _Form(tuple((a, _times(f, factor)) for a, f in self.terms), slope)

    def plus(self, other: "_Form") -> "_Form | None":
        terms = dict(self.terms)
        for atom, factor in other.terms:
            terms[atom] = _plus(terms[atom], factor) if atom in terms else factor
        slope = self.slope or other.slope
        if self.slope is not None and other.slope is not None:
            slope = _plus(self.slope, other.slope)
        return _Form(tuple(terms.items()), slope) if len(terms) <= _MAX_TERMS else None

    @property
    def cost(self) -> int:
        return len(self.terms) + (self.slope is not None)


class Run:
    """Prints `Run`, `bind_run` and `exponent` of a score functor (docs/cuda.md,
    section 2): a query row and some keys, for the forward."""

    along = "kv"  # the index that runs
    last_early = 1  # the last stage whose values are the same all along a run

    def __init__(self, functor: "Functor"):
        self.functor = functor
        self.nodes = functor.nodes
        self.result = functor.program.result
        self.uses = self._count_uses()
        self.members: list[tuple[str, str]] = []  # name, value
        self.int_starts: dict[int, int] = {}  # i32 value -> its slope
        self.body: list[str] = []
        self.emitted: set[int] = set()
        self.tanhs: set[int] = set()
        self.first: list[str] = []  # members that long computations start from

    def lines(self) -> list[str]:
        form = self._outer(self.result)
        text = self._sum(form, self.result, _LOG2E, is_exponent=True)
        return [
            *self._struct("Run"),
            "  FKL_DEVICE Run bind_run(const Head& head, const Row& row, int kv_idx, "
            "int last, float scale, float shift,\n"
            "      fkl::RunGuard& guard) const {",
            *self._bound(),
            "  }",
            "  FKL_DEVICE float exponent(const Head& head, const Row& row, const Run& "
            "run, float product, int kv_idx, int j,\n"
            "      fkl::RunGuard& guard) const {",
            *self.body,
            f"    return {text};",
            "  }",
            "  FKL_DEVICE bool grows(const Head& head) const {",
            f"    return {self._grows(form)};",
            "  }",
        ]

    def _grows(self, form: _Form) -> str:
        """Whether later keys are expected to have larger scores. What reads the key's
        index otherwise than by a slope mostly favours keys near the query, and masks
        leave those before it."""
        if form.slope is None or "row." in form.slope:
            return str(self.functor.program.uses("kv")).lower()
        return f"{form.slope} > 0.0f"

    def _struct(self, name: str) -> list[str]:
        return [
            f"  struct {name} {{",
            *(f"    float {member};" for member, _ in self.members),
            "    FKL_DEVICE void follow(float p, unsigned zero) {",
            *(
                f"      {member} = fkl::not_before(p, zero, {member});"
                for member in self.first
            ),
            "    }",
            "  };",
        ]

    def _bound(self) -> list[str]:
        """The body that computes the members of the struct."""
        values = ", ".join(value for _, value in self.members)
        return [
            *self.functor.statements(self.int_starts),
            *(
                f"    guard.see_run(v{k}, {slope} * last);"
                for k, slope in self.int_starts.items()
            ),
            f"    return {{{values}}};",
        ]

    def is_early(self, k: int) -> bool:
        """True if a value is the same all along a run."""
        return self.nodes[k].op == "const" or self.functor.stage[k] <= self.last_early

    def _inverse(self, k: int) -> str | None:
        if not self.is_early(self.nodes[k].args[1]):
            return None
        return self.functor.inverse(k)

    # -- forms

    def _count_uses(self) -> dict[int, int]:
        uses: dict[int, int] = {}
        stack, seen = [self.result], {self.result}
        while stack:
            for a in self.nodes[stack.pop()].args:
                uses[a] = uses.get(a, 0) + 1
                if a not in seen:
                    seen.add(a)
                    stack.append(a)
        return uses

    def _outer(self, k: int) -> _Form:
        """What a sum makes of a value: its own summands, or the value itself if it has
        to be known anyway."""
        if self.is_early(k):
            return _Form()
        form = self._inner(k)
        if form is None or (self.uses.get(k, 0) > 1 and form.cost > 1):
            is_tanh = self.nodes[k].op == "tanh.f32"
            return _Form(((k, "fkl::kTanhLead" if is_tanh else None),))
        return form

    def _inner(self, k: int) -> _Form | None:
        node = self.nodes[k]
        if node.op == "i32_to_f32":
            slope = self._int_slope(node.args[0])
            if slope is None:
                return None
            return _Form((), f"{slope}.0f" if slope else None)
        if node.op not in _LINEAR:
            return None
        forms = [self._outer(a) for a in node.args]
        early = [self.is_early(a) for a in node.args]
        match node.op:
            case "add.f32":
                return forms[0].plus(forms[1])
            case "sub.f32":
                return forms[0].plus(forms[1].times(_MINUS))
            case "neg.f32":
                return forms[0].times(_MINUS)
            case "div.f32":
                factor = self._inverse(k)
                return None if factor is None else forms[0].times(factor)
        product = self._product(node, forms, early)
        if node.op == "mul.f32" or product is None:
            return product
        return product.plus(forms[2])

    def _product(
        self, node: Node, forms: list[_Form], early: list[bool]
    ) -> _Form | None:
        for one, other in ((0, 1), (1, 0)):
            if early[one]:
                return forms[other].times(self.functor.value(node.args[one]))
        return None

    def _int_slope(self, k: int) -> int | None:
        """How much an i32 value grows from key to key, if that is a constant."""
        node = self.nodes[k]
        if self.is_early(k):
            return 0
        if node.op == "input":
            return int(node.data == self.along)
        if node.op not in ("add.i32", "sub.i32", "neg.i32", "mul.i32"):
            return None
        slopes = [self._int_slope(a) for a in node.args]
        if None in slopes:
            return None
        a, b = (slopes + [0])[:2]
        assert a is not None and b is not None
        if node.op == "mul.i32":
            consts = [self.nodes[x] for x in node.args]
            if consts[0].op == "const":
                slope = consts[0].data * b
            elif consts[1].op == "const":
                slope = consts[1].data * a
            else:
                return None
        else:
            slope = a + b if node.op == "add.i32" else a - b
            slope = -a if node.op == "neg.i32" else slope
        return slope if abs(slope) <= _MAX_INT_SLOPE else None

    # -- text

    def _sum(
        self, form: _Form, k: int, factor: Factor = None, *, is_exponent: bool = False
    ) -> str:
        """`factor * k` per score, for the form of `k`; of the exponent, `shift` too."""
        start = self._start(k, form)
        if start is not None:
            start = _times(start, factor)
        text = self._shifted(start) if is_exponent else self._started(start)
        scaled = form.times(factor)
        if scaled.slope is not None:
            slope = self._member(scaled.slope)
            text = _multiply_add("static_cast<float>(j)", slope, text)
        for atom, f in scaled.terms:
            if self.nodes[atom].data == "score":
                name, f = "product", _times(f, "scale")
            elif self.nodes[atom].op == "tanh.f32":
                name = self._tanh(atom)
            else:
                name = self._value(atom)
            text = _multiply_add(name, None if f is None else self._member(f), text)
        return text or "0.0f"

    def _started(self, start: str | None) -> str | None:
        return None if start is None else self._member(start)

    def _shifted(self, start: str | None) -> str:
        return self._member("shift" if start is None else f"{start} + shift")

    def _start(self, k: int, form: _Form, *, is_root: bool = True) -> str | None:
        """The value at j = 0 with the atoms 0, in the program's own order of
        operations; None is 0."""
        node = self.nodes[k]
        if self.is_early(k):
            is_zero = node.op == "const" and node.data == 0
            return None if is_zero else self.functor.value(k)
        if k in dict(form.terms) and (not is_root or self._inner(k) is None):
            return None
        if node.op == "i32_to_f32":
            slope = self._int_slope(node.args[0])
            assert slope is not None
            self.int_starts[node.args[0]] = slope
            return f"static_cast<float>(v{node.args[0]})"
        starts = [self._start(a, form, is_root=False) for a in node.args]
        match node.op:
            case "add.f32":
                return _plus_start(starts[0], starts[1])
            case "sub.f32":
                return _plus_start(starts[0], _negated(starts[1]))
            case "neg.f32":
                return _negated(starts[0])
            case "div.f32":
                factor = self._inverse(k)
                return None if starts[0] is None else _times(starts[0], factor)
        product = None if None in starts[:2] else _times(starts[0], starts[1])
        return product if node.op == "mul.f32" else _plus_start(product, starts[2])

    def _member(self, value: str) -> str:
        """A value of the run, by its text; literals stay where they are."""
        if _is_literal(value):
            return value
        for name, known in self.members:
            if known == value:
                return f"run.{name}"
        self.members.append((f"m{len(self.members)}", value))
        return f"run.{self.members[-1][0]}"

    def _value(self, k: int) -> str:
        node = self.nodes[k]
        if not self.is_early(k) and k not in self.emitted:
            self.emitted.add(k)
            self._emit(k, node)
        return self.functor.value(k)

    def _tanh(self, k: int) -> str:
        """A tanh in units of its polynomial's first coefficient."""
        if k not in self.tanhs:
            self.tanhs.add(k)
            (argument,) = self.nodes[k].args
            scaled = self._sum(self._outer(argument), argument, "fkl::kTanhUnits")
            self.first += [
                name
                for name, _ in self.members
                if f"run.{name}" in scaled and name not in self.first
            ]
            self._tanh_of(k, scaled)
        return f"t{k}"

    def _tanh_of(self, k: int, argument: str) -> None:
        self.body += [
            f"    const float x{k} = {argument};",
            f"    guard.see(x{k});",
            f"    const float t{k} = fkl::tanh_small(x{k});",
        ]

    def _emit(self, k: int, node: Node) -> None:
        if node.op == "input":
            if node.data == "score":
                scale = self._member("scale")
                self.body.append(f"    const float score = product * {scale};")
            return
        inner = self._inner(k) if node.type == F32 else None
        # Functions of the indices alone may have large arguments: those are rounded as
        # in the program. A converted index is exact either way.
        if inner is not None and (inner.terms or node.op == "i32_to_f32"):
            text = self._sum(inner, k)
        elif node.op == "tanh.f32":
            text = f"{self._tanh(k)} * fkl::kTanhLead"
        else:
            for a in node.args:
                self._value(a)
            text = self.functor.expression(k)
        self.body.append(f"    const {self.functor.c_type(k)} v{k} = {text};")


class _NotCheap(Exception):
    """A program that has no cheap form."""


class QueryRun(Run):
    """Prints `QueryRun`, `bind_query_run`, `look` and `exponent` of a score functor: a
    key and some query rows, for the backward. Only programs with a gradient that is a
    polynomial in one tanh have one; nothing of them can be infinite where P is 0."""

    along = "q"
    last_early = 0

    def lines(self) -> list[str]:
        try:
            return self._lines()
        except _NotCheap:
            flags = "kHasQueryRun = false, kHasConstantSlope = false"
            return [f"  static constexpr bool {flags};"]

    def _lines(self) -> list[str]:
        dscore = self.functor.program.dscore
        assert dscore is not None
        form = self._outer(self.result)
        text = self._sum(form, self.result, _LOG2E, is_exponent=True)
        slope = self._slope(dscore)
        is_constant = str(not any(slope)).lower()
        slope_text = self._slope_text(slope)
        return [
            "  static constexpr bool kHasQueryRun = true, "
            f"kHasConstantSlope = {is_constant};",
            *self._struct("QueryRun"),
            "  FKL_DEVICE QueryRun bind_query_run(const Head& head, const Row& row, "
            "int kv_idx, int last, float scale,\n"
            "      fkl::RunGuard& guard) const {",
            *self._bound(),
            "  }",
            "  FKL_DEVICE void look(const QueryRun& run, float product, int j, "
            "fkl::RunGuard& guard) const {",
            *self.looks,
            "  }",
            "  FKL_DEVICE float exponent(const QueryRun& run, float product, int j, "
            "float shift, float* slope) const {",
            *self.body,
            f"    *slope = {slope_text};",
            f"    return {text};",
            "  }",
        ]

    def __init__(self, functor: "Functor"):
        super().__init__(functor)
        self.looks: list[str] = []

    def _shifted(self, start: str | None) -> str:
        return "shift" if start is None else f"{self._member(start)} + shift"

    def _value(self, k: int) -> str:
        if self.is_early(k):
            return self.functor.value(k)
        raise _NotCheap

    def _tanh_of(self, k: int, argument: str) -> None:
        self.looks.append(f"    guard.see({argument});")
        self.body.append(f"    const float t{k} = fkl::tanh_small({argument});")

    def _slope(self, k: int) -> dict[int, dict[tuple[str, ...], float]]:
        """Of a value that is linear in `ct`: its factor, a polynomial in a tanh, whose
        coefficients are sums of products of early values. Without `ct`: the value."""
        node = self.nodes[k]
        if node.op == "input" and node.data == "ct":
            return {0: {(): 1.0}}
        if self.is_early(k):
            if node.op == "const":
                return {0: {(): float(node.data)}} if node.data else {}
            return {0: {(self.functor.value(k),): 1.0}}
        if node.op == "tanh.f32":
            self._tanh(k)
            if len(self.tanhs) > 1:
                raise _NotCheap
            return {1: {("fkl::kTanhLead",): 1.0}}
        if node.op not in _LINEAR or node.op == "fma.f32":
            raise _NotCheap
        first = self._slope(node.args[0])
        if node.op == "neg.f32":
            return _product(first, {0: {(): -1.0}})
        if node.op == "div.f32":
            factor = self._inverse(k)
            if factor is None:
                raise _NotCheap
            return _product(first, {0: {(factor,): 1.0}})
        second = self._slope(node.args[1])
        if node.op == "mul.f32":
            return _product(first, second)
        sign = 1.0 if node.op == "add.f32" else -1.0
        return _total(first, _product(second, {0: {(): sign}}))

    def _slope_text(self, slope: dict[int, dict[tuple[str, ...], float]]) -> str:
        coefs = {power: _coefficient(c) for power, c in slope.items()}
        if not coefs or max(coefs) > 4:
            raise _NotCheap
        if max(coefs) == 0:
            return self._member(coefs[0])
        (tanh,) = self.tanhs
        step, variable = 1, f"t{tanh}"
        if all(power % 2 == 0 for power in coefs):
            step, variable = 2, f"(t{tanh} * t{tanh})"
        top = max(coefs)
        text = self._member(coefs[top])
        for power in range(top - step, -1, -step):
            addend = self._member(coefs[power]) if power in coefs else None
            text = _multiply_add(text, variable, addend)
        return text


_Polynomial = dict[int, dict[tuple[str, ...], float]]


def _total(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    total: _Polynomial = {}
    for power in {**a, **b}:
        terms = dict(a.get(power, {}))
        for names, number in b.get(power, {}).items():
            terms[names] = terms.get(names, 0.0) + number
        terms = {names: number for names, number in terms.items() if number}
        if terms:
            total[power] = terms
    return total


def _product(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    product: _Polynomial = {}
    for p, x in a.items():
        for q, y in b.items():
            terms = {
                tuple(sorted(m + n)): c * d for m, c in x.items() for n, d in y.items()
            }
            product = _total(product, {p + q: terms})
    return product


def _coefficient(terms: dict[tuple[str, ...], float]) -> str:
    texts = []
    for names, number in sorted(terms.items()):
        factors = [f"{np.float32(number)!s}f", *names]
        if number == 1 and names:
            factors = list(names)
        texts.append(" * ".join(factors))
    return " + ".join(texts)


def _is_literal(text: str) -> bool:
    return text.removeprefix("-").removesuffix("f").replace(".", "", 1).isdigit()


def _times(a: Factor, b: Factor) -> str:
    if a is None or b is None:
        return a or b or "1.0f"
    return f"({a}) * ({b})" if " + " in a + b else f"{a} * {b}"


def _plus(a: Factor, b: Factor) -> str:
    return f"{a or '1.0f'} + {b or '1.0f'}"


def _plus_start(a: str | None, b: str | None) -> str | None:
    return a or b if a is None or b is None else f"({a} + {b})"


def _negated(a: str | None) -> str | None:
    return None if a is None else f"-({a})"


def _multiply_add(a: str, factor: Factor, addend: str | None) -> str:
    if factor is None:
        return a if addend is None else f"{a} + {addend}"
    if addend is None:
        return f"{a} * {factor}"
    return f"fmaf({a}, {factor}, {addend})"
