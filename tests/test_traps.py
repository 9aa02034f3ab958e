"""Known traps of fused attention, each one a test.

Those that are a configuration like any other are in `test_conformance.py` (bias shapes,
captured arrays, scale 0); here are the ones that need values or combinations chosen
with care.
"""

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    Case,
    check,
    check_case,
    make_problem,
    make_step,
    run_backend,
)

import fkl_jax

# ------------------------------------------------------------------ mask combinations

SOURCES = {
    "causal": {"causal": "bottom_right"},
    "mask_mod": {"mask_mods": ("per_head_function",)},
    "mask_as_score_mod": {"mask_as_score": ("window",)},
    "dense_mask": {"mask_mods": ("dense_4d",)},
    "block_mask": {"block_mask": "holes"},
    "segment_ids": {"segment_ids": True},
    "q_seq_lengths": {"lengths": "q"},
    "kv_seq_lengths": {"lengths": "k"},
}


@pytest.mark.parametrize("pair", list(itertools.combinations(SOURCES, 2)), ids="+".join)
def test_two_mask_sources_at_once(pair, backend):
    first, second = (SOURCES[name] for name in pair)
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        merged[name] = first[name] + second[name]
    check_case(Case(q_seq_len=11, poison=True, seed=1, **merged), backend)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "masks",
    [
        {"mask_mods": ("kill_rows",)},
        {"mask_mods": ("nothing",)},
        {"block_mask": "dead"},
        {"block_mask": "dead", "mask_mods": ("kill_rows",)},
        {"lengths": "qk", "mask_mods": ("kill_rows",)},
    ],
    ids=lambda m: "+".join(map(str, m.values())),
)
def test_dead_rows_and_dead_tiles(masks, sinks, backend):
    case = Case(
        q_seq_len=140, kv_seq_len=270, block_q=20, block_kv=30, num_q_heads=2,
        sinks=sinks, poison=True, **masks,
    )  # fmt: skip
    problem = make_problem(case)
    assert not problem.live.any(-1).all()
    check(problem, run_backend(problem, backend))


@pytest.mark.parametrize("block_q,block_kv", [(7, 40), (40, 7), (64, 16), (16, 200)])
def test_asymmetric_block_mask_in_the_backward(block_q, block_kv, backend):
    """Rows and columns of the block mask must not be exchanged on the way back."""
    check_case(
        Case(
            q_seq_len=130, kv_seq_len=70, num_q_heads=2, num_kv_heads=1, batch=(1,),
            block_mask="holes", block_q=block_q, block_kv=block_kv, poison=True,
        ),
        backend,
    )  # fmt: skip


# --------------------------------------------------------------------- extreme scores


@pytest.mark.parametrize("score_mods", [("soft_cap",), ("alibi_soft_cap_function",)])
def test_soft_cap_of_scores_around_1e4(score_mods, backend):
    case = Case(score_mods=score_mods, query_gain=1e4, causal=True)
    problem = make_problem(case)
    check(problem, run_backend(problem, backend))


def test_scores_of_1e4_without_cap(backend):
    check_case(Case(query_gain=1e4, causal=True, sinks=True), backend)


@pytest.mark.parametrize("shift", [-1e5, 1e5])
@pytest.mark.parametrize("masked", [False, True])
def test_all_scores_around_1e5(shift, masked, backend):
    """Neither a dead score nor the padding of a tile may look larger than -1e5."""
    masks = {"mask_mods": ("kill_rows",), "lengths": "k"} if masked else {}
    check_case(Case(score_shift=shift, kv_seq_len=70, **masks), backend)


def _nan(s, distance):
    return s * jnp.sqrt(distance + 0.5)


def _inf(s, distance):
    return s / jnp.maximum(distance + 0.5, 0.0)


def _minus_inf(s, distance):
    return s + jnp.log(jnp.maximum(distance + 0.5, 0.0))


@pytest.mark.parametrize("formula", [_nan, _inf, _minus_inf])
def test_what_a_score_mod_returns_on_dead_elements_never_shows(formula, backend):
    """NaN and infinities, and such derivatives, exactly where causal is dead."""

    def mod(s, b, h, q_idx, kv_idx):
        return formula(s, (q_idx - kv_idx).astype(jnp.float32))

    def harmless(s, b, h, q_idx, kv_idx):
        return formula(s, jnp.maximum(q_idx - kv_idx, 0).astype(jnp.float32))

    q, k, v = _qkv(9, 9)

    def loss(q, k, v, mod):
        out, lse = fkl_jax.attention_with_lse(
            q, k, v, score_mod=mod, causal=True, implementation=backend
        )
        return jnp.sum(out**2) + jnp.sum(lse**2)

    got = jax.value_and_grad(loss, (0, 1, 2))(q, k, v, mod)
    want = jax.value_and_grad(loss, (0, 1, 2))(q, k, v, harmless)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_score_of_minus_infinity_is_a_dead_element_in_effect(backend):
    """A score mod that masks by -inf gives probability 0, also for a whole row."""

    def mod(s, b, h, q_idx, kv_idx):
        return jnp.where((kv_idx <= q_idx) & (q_idx != 2), s, -jnp.inf)

    q, k, v = _qkv(7, 7)
    out, lse = fkl_jax.attention_with_lse(
        q, k, v, score_mod=mod, implementation=backend
    )
    expected, expected_lse = fkl_jax.attention_with_lse(
        q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx != 2),
        implementation=backend,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------- lengths


@pytest.mark.parametrize("length", [5, 66, 140])
@pytest.mark.parametrize("delta", [-1, 0, 1, 1000])
def test_window_below_at_and_above_the_length(length, delta, backend):
    q, k, v = _qkv(length, length)
    window = fkl_jax.SlidingWindow.last(length + delta)
    out = fkl_jax.attention(q, k, v, mask_mod=window, implementation=backend)
    i, j = np.arange(length)[:, None], np.arange(length)
    live = (j <= i) & (j > i - (length + delta))
    expected = fkl_jax.attention(
        q, k, v, mask_mod=fkl_jax.DenseMask(jnp.asarray(live)), implementation=backend
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("t,s", [(33, 8), (8, 33), (130, 70), (70, 300), (1, 70)])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_unequal_lengths(t, s, causal, backend):
    case = Case(
        q_seq_len=t, kv_seq_len=s, causal=causal, num_q_heads=2, batch=(1,),
        score_mods=("relative_bias",),
    )  # fmt: skip
    check_case(case, backend)


@pytest.mark.backends("xla", "ffi")
@pytest.mark.parametrize("number", [-1e9, -1e30, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("through", ["bias", "score_mod"])
def test_rows_masked_by_a_large_finite_number(through, number, backend):
    """Additive masks: such a row is the mean of all values, and nothing in it is NaN,
    which no zero cotangent could stop."""
    q, k, v = _qkv(9, 21)
    masked = jnp.asarray([0, 4, 8])
    bias = jnp.zeros((9, 21)).at[masked].set(number)

    def attend(q, k, v):
        how = (
            dict(bias=bias)
            if through == "bias"
            else dict(score_mod=lambda s, b, h, i, j: jnp.where(i % 4 == 0, number, s))
        )
        return fkl_jax.attention(q, k, v, implementation=backend, **how)

    out = attend(q, k, v)
    mean = jnp.repeat(v.mean(1, keepdims=True), q.shape[2] // v.shape[2], axis=2)
    np.testing.assert_allclose(out[:, masked], mean + 0 * out[:, masked], atol=1e-5)
    # Padding: the rows exist, nobody uses them.
    used = jnp.ones((9, 1, 1)).at[masked].set(0)
    grads = jax.grad(lambda *x: jnp.sum((used * attend(*x)) ** 2), (0, 1, 2))(q, k, v)
    plain = jax.grad(
        lambda *x: jnp.sum(
            (used * fkl_jax.attention(*x, implementation="xla")) ** 2
        ),
        (0, 1, 2),
    )(q, k, v)  # fmt: skip
    for got, want in zip(grads, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch,t,s", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)])
def test_empty_sizes(batch, t, s, backend):
    case = Case(
        batch=(batch,), q_seq_len=t, kv_seq_len=s, bias="NTS", lengths="qk",
        score_mods=("alibi", "captured_scalar"), mask_mods=("window",),
    )  # fmt: skip
    check_case(case, backend)


def test_int64_lengths_and_indices_under_x64(backend):
    case = Case(
        batch=(3,), lengths="qk", segment_ids=True, offsets="batch", causal=True,
        mask_mods=("prefix_lm_per_batch", "window", "padding"),
        score_mods=("alibi", "captured_scalar"),
    )  # fmt: skip
    problem = make_problem(case)
    floats, cotangents = problem.floats, problem.cotangents
    others = {
        name: x.astype(np.int64) if x.dtype == np.int32 else x
        for name, x in problem.others.items()
    }
    with jax.enable_x64(True):
        operands = jax.tree.map(jnp.asarray, (floats, others, cotangents))
        assert operands[1]["kv_seq_lengths"].dtype == jnp.int64
        actual = make_step(case, backend)(*operands)
        check(problem, jax.tree.map(np.asarray, actual))


def test_gradients_of_captured_float64_arrays_under_x64(backend):
    case = Case(score_mods=("captured_table", "captured_scalar"), bias="NTS")
    problem = make_problem(case)
    with jax.enable_x64(True):
        floats = {
            k: jnp.asarray(x, jnp.float64 if k[:5] in ("score", "bias") else x.dtype)
            for k, x in problem.floats.items()
        }
        others, cotangents = jax.tree.map(
            jnp.asarray, (problem.others, problem.cotangents)
        )
        values, grads = make_step(case, backend)(floats, others, cotangents)
        assert all(g.dtype == floats[k].dtype for k, g in grads.items())
        grads = {k: np.asarray(g, np.float32) for k, g in grads.items()}
        check(problem, (jax.tree.map(np.asarray, values), grads))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_wide_segment_ids_stay_apart(dtype, backend):
    """Ids beyond int32, hashes for example, neither wrap nor saturate into one."""
    q, k, v = _qkv(6, 9)
    small = np.random.default_rng(0).integers(0, 3, (2, 15))
    wide = np.asarray([2**31 + 1, 2**31 + 7, 2**32 - 1]) << (dtype is np.int64)
    expected = fkl_jax.attention(
        q, k, v, implementation=backend,
        q_segment_ids=small[:, :6], kv_segment_ids=small[:, 6:],
    )  # fmt: skip
    with jax.enable_x64(True):
        ids = jnp.asarray(wide[small], dtype)
        of_q, of_kv = ids[:, :6], ids[:, 6:]
        for masks in (
            dict(q_segment_ids=of_q, kv_segment_ids=of_kv),
            dict(mask_mod=fkl_jax.SegmentIds(of_q, of_kv)),
            dict(
                block_mask=fkl_jax.BlockMask.from_segment_ids(
                    of_q, of_kv, block_q=1, block_kv=1
                )
            ),
        ):
            out = fkl_jax.attention(q, k, v, implementation=backend, **masks)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_arrays_of_jitted_helpers_are_never_stale(in_a_loop):
    """Two helpers whose jaxprs have one text and hold different arrays."""
    q, k, v = _qkv(6, 9)

    def attend(table):
        helper = jax.jit(lambda s, h: s * table[h])

        def mod(s, b, h, q_idx, kv_idx):
            if in_a_loop:  # which no program has
                return jax.lax.fori_loop(0, 1, lambda _, x: helper(x, h), s)
            return helper(s, h)

        implementation = "xla" if in_a_loop else "ffi"
        return fkl_jax.attention(q, k, v, score_mod=mod, implementation=implementation)

    for table in (jnp.arange(4.0), jnp.ones(4)):
        expected = fkl_jax.attention(
            q, k, v, score_mod=lambda s, b, h, i, j, table=table: s * table[h]
        )
        np.testing.assert_allclose(attend(table), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_narrow_integers_are_taken(dtype, backend):
    q, k, v = _qkv(6, 9)
    lengths = np.asarray([3, 9])
    expected = fkl_jax.attention(
        q, k, v, kv_seq_lengths=jnp.asarray(lengths), implementation=backend,
        mask_mod=fkl_jax.SegmentIds(np.arange(6) // 4, np.arange(9) // 5),
    )  # fmt: skip
    out = fkl_jax.attention(
        q, k, v, kv_seq_lengths=jnp.asarray(lengths, dtype), implementation=backend,
        mask_mod=fkl_jax.SegmentIds(
            (np.arange(6) // 4).astype(dtype), (np.arange(9) // 5).astype(dtype)
        ),
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("offset", [0, 10, 2**20, 2**30])
def test_large_offsets(offset, backend):
    """Indices are exact integers, also where float32 could no longer hold them."""
    q, k, v = _qkv(5, 9)
    out = fkl_jax.attention(
        q, k, v, causal=True, q_offset=offset + 4, kv_offset=offset,
        mask_mod=fkl_jax.SlidingWindow(3), implementation=backend,
    )  # fmt: skip
    expected = fkl_jax.attention(
        q, k, v, causal="bottom_right", implementation=backend,
        mask_mod=fkl_jax.DenseMask(
            jnp.asarray(np.arange(9) >= np.arange(5)[:, None] + 4 - 3)
        ),
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------- LSE in losses


@pytest.mark.parametrize("terms", ["lse", "out+lse", "out*lse"])
def test_lse_in_the_loss(terms, backend):
    """The LSE cotangent is exact, alone and together with that of `out`."""
    qkv = _qkv(9, 9)
    cap = jnp.float32(1.5)

    def fused(q, k, v, cap):
        return fkl_jax.attention_with_lse(
            q, k, v, causal=True, score_mod=fkl_jax.SoftCap(cap), implementation=backend
        )

    def dense(q, k, v, cap):
        k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        s = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        s = jnp.where(np.tri(9, dtype=bool), cap * jnp.tanh(s / cap), -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v), jax.nn.logsumexp(
            s, axis=-1
        )

    def loss(attend, *args):
        out, lse = attend(*args)
        lse = jnp.sin(jnp.swapaxes(lse, 1, 2)[..., None])
        terms_of = {"lse": lse, "out+lse": out**2 + lse, "out*lse": out * lse}
        return jnp.sum(terms_of[terms])

    got = jax.grad(loss, (1, 2, 3, 4))(fused, *qkv, cap)
    want = jax.grad(loss, (1, 2, 3, 4))(dense, *qkv, cap)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_two_halves_merge_by_their_lse(backend):
    """Ring attention's step: needs a float32 natural-log LSE and its gradient."""
    q, k, v = _qkv(6, 10)

    def merged(q, k, v):
        parts = [
            fkl_jax.attention_with_lse(
                q, k[:, s], v[:, s], causal=True, q_offset=4, kv_offset=s.start,
                implementation=backend,
            )
            for s in (slice(0, 7), slice(7, 10))
        ]  # fmt: skip
        lses = jnp.stack([lse for _, lse in parts])
        total = jax.nn.logsumexp(lses, axis=0)
        weights = jnp.swapaxes(jnp.exp(lses - total), 2, 3)[..., None]
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True))

    def whole(q, k, v):
        return fkl_jax.attention(q, k, v, causal="bottom_right", implementation=backend)

    np.testing.assert_allclose(merged(q, k, v), whole(q, k, v), rtol=1e-5, atol=1e-6)
    weight = jax.random.normal(jax.random.key(0), q.shape)
    got = jax.grad(lambda *a: jnp.sum(weight * merged(*a)), (0, 1, 2))(q, k, v)
    want = jax.grad(lambda *a: jnp.sum(weight * whole(*a)), (0, 1, 2))(q, k, v)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------- captured arrays


def test_captured_tracers_of_every_kind_get_their_gradient(backend):
    """Scalar, vector, table and full bias, closed over inside jit(grad)."""
    b, h, t, s = 2, 4, 6, 9
    q, k, v = _qkv(t, s)
    rng = np.random.default_rng(0)
    arrays = {
        "scalar": np.asarray(0.5),
        "vector": rng.standard_normal(s),
        "table": rng.standard_normal((h, 5)),
        "full": rng.standard_normal((b, h, t, s)),
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

    @jax.jit
    def loss(arrays):
        def mod(x, b, h, q_idx, kv_idx):
            x = x * arrays["scalar"] + arrays["vector"][kv_idx]
            x = x + arrays["table"][h, jnp.clip(kv_idx - q_idx, -2, 2) + 2]
            return x + arrays["full"][b, h, q_idx, kv_idx]

        out = fkl_jax.attention(q, k, v, score_mod=mod, implementation=backend)
        return jnp.sum(out**2)

    def dense(arrays):
        i, j = jnp.arange(t)[:, None], jnp.arange(s)
        x = jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 2, 2)) / np.sqrt(q.shape[-1])
        x = x * arrays["scalar"] + arrays["vector"]
        x = x + arrays["table"][:, jnp.clip(j - i, -2, 2) + 2] + arrays["full"]
        p = jax.nn.softmax(x)
        return jnp.sum(jnp.einsum("bhts,bshd->bthd", p, jnp.repeat(v, 2, 2)) ** 2)

    got, want = jax.grad(loss)(arrays), jax.grad(dense)(arrays)
    for name in arrays:
        assert np.abs(want[name]).max() > 1e-3
        np.testing.assert_allclose(
            got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_custom_rules_of_the_user_are_respected(backend):
    """`custom_jvp` and `custom_vjp` say what a derivative is, not the formula."""

    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvps(lambda t, ans, x: 3.0 * t)

    @jax.custom_vjp
    def doubled(x):
        return x * 1.0

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2.0 * g,))
    q, k, v = _qkv(6, 6)

    def grad(mod, q):
        return jax.grad(
            lambda q: jnp.sum(
                fkl_jax.attention(q, k, v, score_mod=mod, implementation=backend) ** 2
            )
        )(q)

    plain = grad(lambda s, *_: s, q)
    np.testing.assert_allclose(
        grad(lambda s, *_: doubled(s), q), 2 * plain, rtol=1e-5, atol=1e-6
    )
    # The value is s to seven digits, the derivative is 3 by decree.
    tripled = grad(lambda s, *_: straight(s * 2.0**18) / 2.0**18, q)
    np.testing.assert_allclose(tripled, 3 * plain, rtol=1e-3, atol=1e-4)


def test_stop_gradient_in_a_score_mod(backend):
    q, k, v = _qkv(6, 6)

    def loss(a):
        def mod(s, b, h, q_idx, kv_idx):
            return s * jax.lax.stop_gradient(a) + a

        return jnp.sum(
            fkl_jax.attention(q, k, v, score_mod=mod, implementation=backend) ** 2
        )

    # Adding a constant to all scores changes nothing, so its gradient is 0.
    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(0.7)), 0.0, atol=2e-4)


# ------------------------------------------------------------------ buffers and memory


def test_old_contents_of_result_buffers_never_show(backend):
    """Results are written whole: rows and columns that nothing reaches give zeros."""
    case = Case(
        q_seq_len=130, kv_seq_len=140, mask_mods=("kill_rows",), block_mask="dead",
        lengths="qk", poison=True, score_mods=("captured_vector",), bias="BNTS",
    )  # fmt: skip
    problem = make_problem(case)
    check(problem, run_backend(problem, backend))
    for _ in range(3):
        # Freed memory full of NaN, of the sizes that the next results will ask for.
        trash = [jnp.full(x.shape, jnp.nan) for x in problem.floats.values()] * 3
        jax.block_until_ready(trash)
        del trash
        gc.collect()
        check(problem, run_backend(problem, backend))


def test_strided_and_transposed_operands(backend):
    """Operands that XLA has transposed or sliced are read as what they mean."""
    q, k, v = _qkv(12, 12)
    expected = fkl_jax.attention(q, k, v, causal=True, implementation=backend)

    @jax.jit
    def f(q, k, v):
        q, k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        q, k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        k = jnp.concatenate([k, k], axis=1)[:, : k.shape[1]]
        return fkl_jax.attention(q, k, v, causal=True, implementation=backend)

    np.testing.assert_allclose(f(q, k, v), expected, rtol=1e-6, atol=1e-6)


def test_numpy_operands(backend):
    q, k, v = _qkv(6, 6)
    expected = fkl_jax.attention(q, k, v, implementation=backend)
    out = fkl_jax.attention(*map(np.asarray, (q, k, v)), implementation=backend)
    np.testing.assert_array_equal(out, expected)


def _qkv(t, s, batch=2, heads=4, kv_heads=2, dim=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (
        (batch, t, heads, dim),
        (batch, s, kv_heads, dim),
        (batch, s, kv_heads, dim),
    )
    return tuple(
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
