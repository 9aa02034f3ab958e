"""Each operation of programs, as printed for the device and run on the CPU, against
numpy in float64."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import on_cpu
import pytest

from fkl_jax import _functors
from fkl_jax._program import BOOL, F32, I32, OPS, Node, Program

_BINARY = {"add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2"} | {
    *("eq", "ne", "lt", "le", "and", "or", "xor", "shl", "shra", "shrl")
}


def _operand_types(op: str) -> tuple[str, ...]:
    name, _, kind = op.partition(".")
    if op == "select":
        return (BOOL, F32, F32)
    if not kind:
        return ({"i": I32, "f": F32, "b": BOOL}[op.removeprefix("bits_")[0]],)
    return (kind,) * (3 if name == "fma" else 2 if name in _BINARY else 1)


def _result_type(op: str) -> str:
    name, _, kind = op.partition(".")
    if name in ("eq", "ne", "lt", "le", "is_finite"):
        return BOOL
    if op == "select":
        return F32
    return kind or op.rpartition("_to_")[2]


def _single(op: str) -> Program:
    """`op` of the score (and of the loads of two arrays), as a score program."""
    nodes = [Node("input", F32, (), "score"), Node("input", I32, (), "kv")]
    args = []
    for k, kind in enumerate(_operand_types(op)):
        dtype = {F32: "float32", I32: "int32", BOOL: "bool"}[kind]
        nodes.append(Node("load", kind, (1,), (k, (COUNT,), dtype)))
        args.append(len(nodes) - 1)
    nodes.append(Node(op, _result_type(op), tuple(args)))
    to_float = {I32: "bits_i32_to_f32", BOOL: "bool_to_f32"}.get(_result_type(op))
    if to_float:
        nodes.append(Node(to_float, F32, (len(nodes) - 1,)))
    return Program("score", tuple(nodes), len(nodes) - 1)


ALL_OPS = [op for op in OPS if op not in ("const", "input", "load")]
_INTS = np.array(
    [0, 1, -1, 2, -2, 3, 7, -13, 31, 32, 33, 255, 2**31 - 1, -(2**31), 65537], np.int32
)
_SPECIALS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.5,
    -2.5,
    1e-40,
    -3e-39,
    3e38,
    65504.0,
    65520.0,
]
_SPECIALS += [
    6e-8,
    1e-7,
    np.inf,
    -np.inf,
    np.nan,
    2.0**31,
    -(2.0**31),
    1e10,
    47999,
    5e4,
]
COUNT = 4096

_EXACT_F32 = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "rem": np.fmod,
    "floor": np.floor,
    "ceil": np.ceil,
    "round_even": np.rint,
    "round_away": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "sign": np.sign,
    "round_bf16": lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64),
    "round_f16": lambda x: np.asarray(x, np.float16).astype(np.float64),
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
}
_NEAR_F32 = {
    "div": np.divide,
    "pow": np.power,
    "atan2": np.arctan2,
    "fma": lambda a, b, c: a * b + c,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "erf": np.vectorize(math.erf),
}


def _logical_shift(a, n):
    return np.where((n < 0) | (n > 31), 0, (a & 0xFFFFFFFF) >> np.clip(n, 0, 31))


_ON_INTS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.where(
        b == 0, -1, np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))
    ),
    "rem": lambda a, b: np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))),
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": lambda a, n: np.where((n < 0) | (n > 31), 0, a << np.clip(n, 0, 31)),
    "shra": lambda a, n: a >> np.where((n < 0) | (n > 31), 31, n),
    "shrl": _logical_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
}
_ON_BOOLS = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}


def _saturate(x):
    x = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
    return np.clip(x, -(2.0**31), 2.0**31 - 1).astype(np.int32)


_CONVERSIONS = {
    "select": lambda c, a, b: np.where(c, a, b),
    "i32_to_f32": lambda x: x.astype(np.float32),
    "f32_to_i32": _saturate,
    "bool_to_f32": np.float32,
    "bool_to_i32": np.int32,
    "bits_f32_to_i32": lambda x: x.astype(np.float32).view(np.int32),
    "bits_i32_to_f32": lambda x: x.astype(np.int32).view(np.float32),
}


def _expected(op: str, args: list[np.ndarray]) -> np.ndarray:
    name, _, kind = op.partition(".")
    if not kind:
        return np.asarray(_CONVERSIONS[op](*args))
    if kind == BOOL:
        return np.asarray(_ON_BOOLS[name](*args))
    if kind == I32:
        out = np.asarray(_ON_INTS[name](*(a.astype(np.int64) for a in args)))
        return out if out.dtype == bool else out.astype(np.int64).astype(np.int32)
    f = _EXACT_F32.get(name) or _NEAR_F32[name]
    return np.asarray(f(*(a.astype(np.float64) for a in args)))


def _values(kind: str, position: int) -> np.ndarray:
    rng = np.random.default_rng(position)
    if kind == BOOL:
        return rng.random(COUNT) < 0.5
    if kind == I32:
        pairs = np.array(list(itertools.product(_INTS, _INTS)), np.int32)
        more = rng.integers(-(2**31), 2**31, COUNT - len(pairs)).astype(np.int32)
        return np.concatenate([pairs[:, position % 2], more])
    pairs = np.array(list(itertools.product(_SPECIALS, _SPECIALS)), np.float32)
    wide = rng.standard_normal(COUNT - len(pairs)) * 10 ** rng.uniform(
        -6, 6, COUNT - len(pairs)
    )
    return np.concatenate([pairs[:, position % 2], wide.astype(np.float32)])


OP_HARNESS = """
namespace op{number} {{
{functor}
}}
extern "C" void op{number}_run(const void** captures, int count, float* value) {{
  fkl::CommonParams params{{}};
  for (int k = 0; k < 3; ++k) params.captures[k].data = const_cast<void*>(captures[k]);
  const auto mod = op{number}::ScoreMod::bind(params, fkl::outer_index(params, 0));
  const auto head = mod.bind_head(0, 0);
  const auto row = mod.bind_row(head, 0);
  for (int i = 0; i < count; ++i) value[i] = mod.score(head, row, 0, i);
}}
"""


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    text = '#include "attention/mods.cuh"\n'
    for number, op in enumerate(ALL_OPS):
        functor = "\n".join(_functors.functor("ScoreMod", _single(op), ()))
        text += OP_HARNESS.format(number=number, functor=functor)
    return on_cpu.compile_text(text, tmp_path_factory.mktemp("operations"))


@pytest.mark.parametrize("op", ALL_OPS)
def test_each_operation_means_what_the_programs_say(operations, op):
    args = [_values(kind, k) for k, kind in enumerate(_operand_types(op))]
    value = np.zeros(COUNT, np.float32)
    run = getattr(operations, f"op{ALL_OPS.index(op)}_run")
    run(on_cpu.pointers([*args, *[args[0]] * 2]), COUNT, on_cpu.pointer(value))
    with np.errstate(all="ignore"):
        expected = _expected(op, args)
        if _result_type(op) == I32:
            np.testing.assert_array_equal(value.view(np.int32), expected)
            return
        rounded = expected.astype(np.float32)
    if op.partition(".")[0] in _NEAR_F32:
        # NaN and infinities are the same ones; else four units in the last place.
        if op in ("sin.f32", "cos.f32", "tan.f32"):
            known = ~(np.abs(args[0]) > 2.0**50) | np.isinf(args[0])
            value, expected, rounded = value[known], expected[known], rounded[known]
        finite = np.isfinite(rounded)
        np.testing.assert_array_equal(value[~finite], rounded[~finite])
        unit = np.spacing(np.maximum(np.abs(rounded[finite]), np.float32(1e-38)))
        error = np.abs(value[finite] - expected[finite]) / unit
        assert error.max() <= 4
    else:
        np.testing.assert_array_equal(value, rounded)


def test_every_operation_of_programs_has_an_expression():
    assert set(_functors._EXPRESSION) == set(ALL_OPS)
