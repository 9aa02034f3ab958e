"""The functors that `_codegen.py` prints, run on the CPU, against JAX's own evaluation
of the same function; and the text itself."""

import ctypes
import dataclasses
import functools
from typing import Any

import catalogue
import cuda_calls
import jax
import jax.numpy as jnp
import numpy as np
import on_cpu
import pytest
from cases import Case
from jax.extend import core as jex_core

import fkl_jax
from fkl_jax import _codegen, _functors
from fkl_jax._compose import split_mods, trace_masks, trace_scores
from fkl_jax._mask_mods import as_mask_mod
from fkl_jax._program import BOOL, F32, I32, Node, Program

SIZES = catalogue.Sizes(batch=2, num_q_heads=4, q_seq_len=11, kv_seq_len=41)
SHAPE = (SIZES.batch, SIZES.num_q_heads, SIZES.q_seq_len, SIZES.kv_seq_len)
ALL_CAPTURES = tuple(f"capture.{k}" for k in range(_codegen.MAX_CAPTURES))
Q_OFFSET = 3


def _nan_like(s, b, h, q_idx, kv_idx):
    return jnp.log(s - 100.0) * jnp.sqrt(-s)  # of no score a number


def _own(table, kv_table):
    def mod(s, b, h, q_idx, kv_idx):
        # One gradient of each stage: per head, per row (twice), per element.
        row = table[b, q_idx % 3] * table[0, q_idx]
        return s * table[h, 1] + row + kv_table[q_idx - kv_idx + 5, h]

    return mod


OWN = {
    "nan": catalogue.ScoreEntry(
        name="nan",
        make_params=lambda rng, z: (),
        build=lambda: _nan_like,
        value=lambda *args: args[0],
    ),
    "every_stage": catalogue.ScoreEntry(
        name="every_stage",
        make_params=lambda rng, z: (
            rng.standard_normal((4, 20)).astype(np.float32),
            rng.standard_normal((9, z.num_q_heads)).astype(np.float16),
        ),
        build=lambda *params: _own(*params),
        value=lambda *args: args[0],
    ),
}
SCORES = {**catalogue.SCORE_MODS, **OWN}


@functools.cache
def _traced(name: str) -> tuple[Any, list[np.ndarray]]:
    """A mod of the catalogue after tracing, and the arrays that it reads."""
    rng = np.random.default_rng(len(name))
    entry = SCORES.get(name) or MASKS[name]
    mod = entry.build(*map(jnp.asarray, entry.make_params(rng, SIZES)))
    if name in SCORES:
        scores, _ = split_mods(mod, None)
        traced, captures = trace_scores(scores, jnp.float32)
    else:
        traced, captures = trace_masks([as_mask_mod(mod)])
    assert traced is not None
    return traced, [np.array(c, order="C") for c in captures]


def _names(entries: dict[str, Any]) -> list[str]:
    return [n for n in entries if _traced(n)[0].program is not None]


def _function(name: str):
    traced, captures = _traced(name)
    closed = traced.traced.closed
    return jex_core.jaxpr_as_fun(closed), captures


# A warp goes over the rows of one head, its lanes over the keys, as in the kernels.
HARNESS = """
namespace mod_{name} {{
{functor}
}}
extern "C" void {name}_run(const void** captures, float** grads, const int* shape,
                           int q_offset, const float* score, const float* ct,
                           float* value, float* dscore) {{
  using namespace mod_{name};
  fkl::BackwardParams params{{}};
  for (int k = 0; k < fkl::kMaxCaptures && captures[k]; ++k) {{
    params.common.captures[k].data = const_cast<void*>(captures[k]);
    params.dcaptures[k].data = grads[k];
  }}
  for (int bh = 0; bh < shape[0] * shape[1]; ++bh) on_cpu::RunWarp([&] {{
    const auto outer = fkl::outer_index(params.common, 0);
    const auto mod = ScoreMod::bind(params.common, outer);
    const auto head = mod.bind_head(bh / shape[1], bh % shape[1]);
    const auto capture_grads = fkl::CaptureGrads::bind(params, outer);
    ScoreMod::HeadGrads head_grads{{}};
    for (int q = 0; q < shape[2]; ++q) {{
      const auto row = mod.bind_row(head, q + q_offset);
      ScoreMod::RowGrads row_grads{{}};
      for (int first = 0; first < shape[3]; first += 32) {{
        const int kv = first + threadIdx.x;
        const bool is_inside = kv < shape[3];
        const int at = (bh * shape[2] + q) * shape[3] + (is_inside ? kv : 0);
        const float d = mod.derivative(head, row, is_inside ? score[at] : NAN, kv,
                                       is_inside ? ct[at] : 0.0f, capture_grads,
                                       head_grads, row_grads);
        if (!is_inside) continue;
        value[at] = mod.score(head, row, score[at], kv);
        dscore[at] = d;
      }}
      mod.template flush_row<31>(head, row, capture_grads, row_grads);
    }}
    mod.flush_head(head, capture_grads, head_grads);
  }});
}}
"""


# The cheap forms: each lane has a run of keys (forward) or of query rows (backward).
RUNS = """
namespace forward_{name} {{
{forward}
}}
extern "C" void {name}_runs(const void** captures, const int* shape, int q_offset,
                            const float* score, float* by_keys, float* by_rows,
                            float* slope, bool* trips) {{
  fkl::CommonParams params{{}};
  for (int k = 0; k < fkl::kMaxCaptures && captures[k]; ++k)
    params.captures[k].data = const_cast<void*>(captures[k]);
  constexpr int kLength = {length};
  constexpr float kScale = {scale}f, kShift = {shift}f;
  const auto outer = fkl::outer_index(params, 0);
  const auto forward = forward_{name}::ScoreMod::bind(params, outer);
  const auto for_each = [&](auto body) {{
    for (int bh = 0; bh < shape[0] * shape[1]; ++bh)
      for (int q = 0; q < shape[2]; ++q)
        for (int kv = 0; kv < shape[3]; ++kv)
          body(bh, q, kv, (bh * shape[2] + q) * shape[3] + kv);
  }};
  for_each([&](int bh, int q, int kv, int at) {{
    const auto head = forward.bind_head(bh / shape[1], bh % shape[1]);
    const auto row = forward.bind_row(head, q + q_offset);
    const int j = kv % kLength;
    fkl::RunGuard guard;
    auto run = forward.bind_run(head, row, kv - j, kLength - 1, kScale, kShift, guard);
    run.follow(score[at], 0);
    by_keys[at] = forward.exponent(head, row, run, score[at] / kScale, kv, j, guard);
    trips[at] = guard.is_tripped();
  }});
  const auto backward = [&](auto mod) {{
    if constexpr (decltype(mod)::kHasQueryRun) {{
      for_each([&](int bh, int q, int kv, int at) {{
        const auto head = mod.bind_head(bh / shape[1], bh % shape[1]);
        const int j = q % kLength;
        const auto row = mod.bind_row(head, q - j + q_offset);
        fkl::RunGuard guard;
        auto run = mod.bind_query_run(head, row, kv, kLength - 1, kScale, guard);
        run.follow(score[at], 0);
        mod.look(run, score[at] / kScale, j, guard);
        by_rows[at] = mod.exponent(run, score[at] / kScale, j, kShift, &slope[at]);
        if (guard.is_tripped()) by_rows[at] = NAN;
      }});
    }}
  }};
  backward(mod_{name}::ScoreMod::bind(params, outer));
}}
"""
RUN_LENGTH, RUN_SCALE, RUN_SHIFT = 7, 1.7, -2.5
HAVE_QUERY_RUNS = {"soft_cap", "alibi", "alibi_one_slope", "temperature"} | {
    "alibi_soft_cap_function",
    "soft_cap_20",
    "soft_cap_50",
    "captured_scalar",
    "captured_half_table",
}


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    text = '#include "attention/mods.cuh"\n'
    for name in _names(SCORES):
        program = _traced(name)[0].program
        functor = "\n".join(_functors.functor("ScoreMod", program, ALL_CAPTURES))
        text += HARNESS.format(name=name, functor=functor)
        forward = "\n".join(_functors.functor("ScoreMod", program.forward(), ()))
        text += RUNS.format(
            name=name,
            forward=forward,
            length=RUN_LENGTH,
            scale=RUN_SCALE,
            shift=RUN_SHIFT,
        )
    return on_cpu.compile_text(text, tmp_path_factory.mktemp("scores"))


@pytest.mark.parametrize("name", _names(SCORES))
def test_score_derivative_and_captured_gradients_are_jax_s(scores, name):
    rng = np.random.default_rng(1)
    score = (3 * rng.standard_normal(SHAPE)).astype(np.float32)
    ct = rng.standard_normal(SHAPE).astype(np.float32)
    dead = rng.random(SHAPE) < 0.3
    ct[dead] = 0
    poisoned = np.where(dead, np.float32(np.nan), score)

    function, captures = _function(name)
    grads = [np.zeros(c.shape, np.float32) for c in captures]
    value, dscore = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    padding = [np.zeros(0)] * (_codegen.MAX_CAPTURES - len(captures))
    arrays = on_cpu.pointers([*captures, *padding])
    for k in range(len(captures), _codegen.MAX_CAPTURES):
        arrays[k] = None
    getattr(scores, f"{name}_run")(
        arrays,
        on_cpu.pointers(grads),
        on_cpu.pointer(np.asarray(SHAPE, np.int32)),
        Q_OFFSET,
        on_cpu.pointer(poisoned),
        on_cpu.pointer(ct),
        on_cpu.pointer(value),
        on_cpu.pointer(dscore),
    )

    b, h, q, kv = (i.astype(np.int32).ravel() for i in np.indices(SHAPE))
    floats = [k for k, c in enumerate(captures) if c.dtype.kind in "fV"]

    @jax.jit
    @jax.vmap
    def whole(s, ct, b, h, q, kv):
        def of(s, *parameters):
            arrays = list(map(jnp.asarray, captures))
            for k, x in zip(floats, parameters, strict=True):
                arrays[k] = x.astype(captures[k].dtype)
            return function(s, b, h, q, kv, *arrays)[0]

        value, vjp = jax.vjp(of, s, *(jnp.asarray(captures[k]) for k in floats))
        return value, *vjp(ct)

    scalars = (score.ravel(), ct.ravel(), b, h, q + Q_OFFSET, kv)
    expected, expected_dscore, *expected_grads = whole(*scalars)
    expected, expected_dscore = (
        np.asarray(x).reshape(SHAPE) for x in (expected, expected_dscore)
    )
    if name == "nan":
        assert np.isnan(value).all() and (dscore[dead] == 0).all()
        return
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5)
    close(value[~dead], expected[~dead], atol=2e-6)
    close(dscore, expected_dscore, atol=2e-6)
    for k, per_score in zip(floats, expected_grads, strict=True):
        e = np.asarray(per_score, np.float64).sum(0)
        # Of 16-bit arrays JAX rounds each gradient to 16 bits.
        tolerance = 2e-5 if captures[k].dtype == np.float32 else 2e-2
        atol = tolerance * max(float(np.abs(e).max()), 1.0)
        np.testing.assert_allclose(grads[k], e, rtol=tolerance, atol=atol)


# --- classification ------------------------------------------------------------------

MASK_HARNESS = """
namespace mod_{name} {{
{functor}
}}
// Per box of q first, q last, kv first, kv last: what classify says, and whether any
// and all elements are live.
extern "C" void {name}_run(const void** captures, int b, int h, const int* boxes,
                           int count, int* states, int* any, int* all) {{
  fkl::CommonParams params{{}};
  for (int k = 0; k < fkl::kMaxCaptures; ++k)
    params.captures[k].data = const_cast<void*>(captures[k]);
  const auto mod = mod_{name}::MaskMod::bind(params, fkl::outer_index(params, 0));
  const auto head = mod.bind_head(b, h);
  for (int i = 0; i < count; ++i, boxes += 4) {{
    states[i] = mod.classify(head, boxes[0], boxes[1], boxes[2], boxes[3]);
    any[i] = 0, all[i] = 1;
    for (long long q = boxes[0]; q <= boxes[1]; ++q) {{
      const auto row = mod.bind_row(head, int(q));
      for (long long kv = boxes[2]; kv <= boxes[3]; ++kv) {{
        const bool live = mod.live(head, row, int(kv));
        any[i] |= live, all[i] &= live;
      }}
    }}
  }}
}}
"""


def _float_mask(b, h, q, kv):
    x = jnp.exp(-0.1 * (q - kv).astype(jnp.float32)) + jnp.floor(q / 7)
    return (jnp.tanh(x) < 0.9) | (jnp.sqrt(jnp.abs(1.0 * q)) > kv / 3.0)


def _integer_mask(b, h, q, kv):
    near = jnp.maximum(q - kv, kv - q) < 9
    block = (q // 8 == kv // 8) & ((q & 7) <= (kv << 1))
    return jnp.where(h > 1, near ^ block, jnp.clip(kv, q - 4, q + 2) == kv) | (~q == kv)


OWN_MASKS = {
    name: catalogue.MaskEntry(
        name=name,
        make_params=lambda rng, z: (),
        build=lambda f=f: f,
        dense=lambda b, h, q, kv: q,
    )
    for name, f in (("floats", _float_mask), ("integers", _integer_mask))
}
MASKS = {**catalogue.MASK_MODS, **OWN_MASKS}
EXACT = {"causal", "window", "window_last", "window_left_only", "window_right_only"}
EXACT |= {"padding", "nothing"}


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    text = '#include "attention/interval.cuh"\n'
    for name in _names(MASKS):
        functor = "\n".join(_functors.functor("MaskMod", _traced(name)[0].program, ()))
        text += MASK_HARNESS.format(name=name, functor=functor)
    return on_cpu.compile_text(text, tmp_path_factory.mktemp("masks"))


@pytest.mark.parametrize("name", _names(MASKS))
def test_classify_never_promises_what_is_not_so(masks, name):
    _, captures = _traced(name)
    rng = np.random.default_rng(2)
    count = 600
    first = rng.integers(-20, 60, (count, 2))
    first[:20] += 2**31 - 200
    first[20:40] -= 2**31 - 200
    last = first + rng.choice([0, 1, 7, 31], (count, 2))
    boxes = np.stack([first[:, 0], last[:, 0], first[:, 1], last[:, 1]], 1)
    boxes = np.ascontiguousarray(boxes.astype(np.int32))
    arrays = on_cpu.pointers(captures + [np.zeros(1)] * (12 - len(captures)))
    seen = set()
    for b, h in ((0, 0), (1, 3)):
        state, any_live, all_live = (np.zeros(count, np.int32) for _ in range(3))
        out = [on_cpu.pointer(x) for x in (state, any_live, all_live)]
        run = getattr(masks, f"{name}_run")
        run(arrays, b, h, on_cpu.pointer(boxes), count, *out)
        assert not any_live[state == 0].any()
        assert all_live[state == 2].all()
        seen |= set(state.tolist())
        if name in EXACT:
            np.testing.assert_array_equal(
                state, np.where(any_live == 0, 0, np.where(all_live, 2, 1))
            )
    if not name.startswith(("dense", "own", "floats", "segment", "captured")):
        assert seen - {1}, "nothing is ever skipped"


# --- the text ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in _names(SCORES) if n != "nan"])
def test_cheap_forms_are_the_program_unless_they_say_no(scores, name):
    rng = np.random.default_rng(2)
    score = (2 * rng.standard_normal(SHAPE)).astype(np.float32)
    function, captures = _function(name)
    by_keys, by_rows, slope = (np.full(SHAPE, np.nan, np.float32) for _ in range(3))
    trips = np.zeros(SHAPE, bool)
    padding = [np.zeros(0)] * (_codegen.MAX_CAPTURES - len(captures))
    arrays = on_cpu.pointers([*captures, *padding])
    for k in range(len(captures), _codegen.MAX_CAPTURES):
        arrays[k] = None
    getattr(scores, f"{name}_runs")(
        arrays,
        on_cpu.pointer(np.asarray(SHAPE, np.int32)),
        Q_OFFSET,
        *map(on_cpu.pointer, (score, by_keys, by_rows, slope, trips)),
    )
    b, h, q, kv = (i.astype(np.int32).ravel() for i in np.indices(SHAPE))

    @jax.jit
    @jax.vmap
    def whole(s, b, h, q, kv):
        def of(s):
            return function(s, b, h, q, kv, *map(jnp.asarray, captures))[0]

        return jax.value_and_grad(of)(s)

    value, dscore = (
        np.asarray(x, np.float64).reshape(SHAPE)
        for x in whole(score.ravel(), b, h, q + Q_OFFSET, kv)
    )
    log2 = value * np.log2(np.e)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)
    assert np.mean(trips) < 0.95
    close((by_keys - np.float64(RUN_SHIFT))[~trips], log2[~trips])
    assert (name in HAVE_QUERY_RUNS) == bool(np.isfinite(slope).any())
    if name in HAVE_QUERY_RUNS:
        ok = np.isfinite(by_rows)
        assert np.mean(ok) > 0.05
        close((by_rows - np.float64(RUN_SHIFT))[ok], log2[ok])
        close(slope[ok], dscore[ok])


def test_the_polynomial_for_tanh_is_as_good_as_float32_within_its_reach(tmp_path):
    text = """#include "attention/mods.cuh"
extern "C" float tanh_of(float x) {
  return fkl::tanh_small(x * fkl::kTanhUnits) * fkl::kTanhLead;
}
extern "C" bool refuses(float x) {
  fkl::RunGuard guard;
  guard.see(x * fkl::kTanhUnits);
  return guard.is_tripped();
}"""
    library = on_cpu.compile_text(text, tmp_path)
    for function, result in (
        (library.tanh_of, ctypes.c_float),
        (library.refuses, bool),
    ):
        function.argtypes = [ctypes.c_float]
        function.restype = ctypes.c_bool if result is bool else result
    xs = np.linspace(-0.6999, 0.6999, 4001, dtype=np.float32)
    got = np.array([library.tanh_of(x) for x in xs])
    np.testing.assert_allclose(got, np.tanh(xs.astype(np.float64)), rtol=6e-7)
    assert not any(library.refuses(x) for x in xs)
    assert all(library.refuses(x) for x in (0.7001, -0.7001, 1e30, np.inf, np.nan))


def test_a_run_whose_index_wraps_is_refused(tmp_path):
    mod = fkl_jax.ScoreMod(lambda s, b, h, q, kv: s + (q - kv))
    program = trace_scores([mod], jnp.float32)[0].program.forward()
    functor = "\n".join(_functors.functor("ScoreMod", program, ()))
    text = f"""#include "attention/mods.cuh"
{functor}
extern "C" bool refuses(int q, int kv, int last) {{
  const auto mod = ScoreMod::bind({{}}, {{}});
  const auto head = mod.bind_head(0, 0);
  fkl::RunGuard guard;
  mod.bind_run(head, mod.bind_row(head, q), kv, last, 1.0f, 0.0f, guard);
  return guard.is_tripped();
}}"""
    refuses = on_cpu.compile_text(text, tmp_path).refuses
    refuses.restype = ctypes.c_bool
    lowest = -(2**31)
    assert not refuses(5, 100, 127) and not refuses(lowest, -(2**30), 127)
    assert not refuses(lowest + 127, 0, 127) and refuses(lowest + 126, 0, 127)
    assert refuses(lowest, 0, 1) and not refuses(lowest, 0, 0)


def test_equal_programs_print_equal_texts_that_depend_on_what_is_asked_for():
    def build():
        table = jnp.ones((4, 3))
        mod = fkl_jax.ScoreMod(lambda s, b, h, q, kv: s * table[h, 1])
        return trace_scores([mod], jnp.float32)[0].program

    first, second = build(), build()
    text = list(_functors.functor("ScoreMod", first, ALL_CAPTURES))
    assert text == list(_functors.functor("ScoreMod", second, ALL_CAPTURES))
    assert text[0] == '#line 1 "score program"'
    without = list(_functors.functor("ScoreMod", first, ()))
    assert any("add_sum" in x for x in text) and not any(
        "add_sum" in x for x in without
    )
    forward = "\n".join(_functors.functor("ScoreMod", first.forward(), ()))
    assert "derivative" not in forward and "Grads" not in forward


def test_no_function_per_score_where_one_per_head_is_enough():
    cap = jnp.float32(2.0)
    mod = fkl_jax.ScoreMod(lambda s, b, h, q, kv: s / (cap * h + jnp.exp(q / 8.0)))
    program = trace_scores([mod], jnp.float32)[0].program.forward()
    text = "\n".join(_functors.functor("ScoreMod", program, ()))
    per_score = text[text.index("float score(") : text.index("struct Run")]
    assert not any(word in per_score for word in ("exp", "div", "capture"))
    per_key = text[text.index("float exponent(") :]
    assert not any(word in per_key for word in ("expf", "div", "capture", "head."))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (F32, 0.1, "0.1f"),
        (F32, 1.0, "1.0f"),
        (F32, -0.0, "-0.0f"),
        (F32, 1e-30, "1e-30f"),
        (F32, np.inf, "__int_as_float(2139095040)"),
        (I32, -(2**31), "(-2147483647 - 1)"),
        (BOOL, True, "true"),
    ],
)
def test_literals_are_the_exact_values(kind, value, text):
    assert _functors._literal(kind, value) == text


def _load_program(*shape: int) -> Program:
    index = Node("input", I32, (), "kv")
    load = Node("load", F32, (0,) * len(shape), (0, shape, "float32"))
    nodes = (index, load, Node("input", F32, (), "ct"))
    return Program("score", nodes, 1, dscore=2, load_grads=((1, 2),))


def test_offsets_are_64_bit_where_an_array_needs_it():
    small = "\n".join(_functors.functor("ScoreMod", _load_program(9, 9), ALL_CAPTURES))
    large = "\n".join(
        _functors.functor("ScoreMod", _load_program(70000, 70000), ALL_CAPTURES)
    )
    assert "long long" not in small and "PendingGrad<int> g0" in small
    assert "static_cast<long long>(fkl::clamp_index(kv_idx, 70000)) * 70000" in large
    assert "PendingGrad<long long> g0" in large


def test_an_array_without_elements_is_never_read():
    text = "\n".join(_functors.functor("ScoreMod", _load_program(0), ALL_CAPTURES))
    assert "read_element" not in text and "add_later" not in text


def _changed(call: cuda_calls.Call, **avals: jax.ShapeDtypeStruct) -> cuda_calls.Call:
    named = dict(zip(call.spec.operands, call.avals, strict=False))
    kept = call.avals[len(named) :]
    changed = tuple({**named, **avals}.values())
    return dataclasses.replace(call, avals=(*changed, *kept))


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("direction", [0, 1])
def test_what_the_kernels_cannot_take_is_refused_with_a_reason(direction):
    plain = cuda_calls.calls(Case())[direction]
    query = _array(2, 13, 4, 300)
    with pytest.raises(NotImplementedError, match="head_dim is 300.* 1 to 256"):
        _changed(plain, query=query, key=_array(2, 13, 2, 300)).glue()
    with jax.enable_x64(True):
        query = _array(2, 13, 4, 16, dtype=jnp.float64)
    with pytest.raises(NotImplementedError, match="query has dtype float64"):
        _changed(plain, query=query).glue()
    many = dataclasses.replace(plain.spec, capture_ndims=(0,) * 13)
    with pytest.raises(NotImplementedError, match="read 13 arrays.* at most 12"):
        dataclasses.replace(plain, spec=many).glue()
    unsupported = trace_scores(
        [fkl_jax.ScoreMod(lambda s, b, h, q, kv: s + jax.lax.erf_inv(s))], jnp.float32
    )[0]
    spec = dataclasses.replace(plain.spec, score=unsupported)
    with pytest.raises(NotImplementedError, match="score_mod cannot be .* `erf_inv`"):
        dataclasses.replace(plain, spec=spec).glue()


def test_config_says_which_operands_a_call_has():
    case = Case(dtype="bfloat16", head_dim=36, bias="BNTS", sinks=True, lengths="k")
    text = cuda_calls.calls(case)[1].glue().text
    for line in (
        "using Element = fkl::BFloat16;",
        "using BiasElement = float;",
        "bool kAligned = FKL_ALIGNED;",
        "int kHeadDim = 48;",
        "int kValueHeadDim = 16;",
        "bool kHasBias = true;",
        "bool kHasKvLengths = true;",
        "bool kHasQLengths = false;",
        "bool kHasSinks = true;",
        "bool kHasDbias = true;",
        "bool kMergedQuery = false;",  # a bias of its own for each head
        "using ScoreMod = fkl::NoScoreMod;",
        "using MaskMod = fkl::NoMaskMod;",
    ):
        assert line in text, line
