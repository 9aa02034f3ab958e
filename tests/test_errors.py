"""What bad input gets: the type of the error, and a text that helps.

Every text names the argument, says what it was and what is allowed.  A pattern here
lists the words that must occur, in order.
"""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax
from fkl_jax import _backends, _ffi

B, T, S, N, K, H = 2, 8, 12, 4, 2, 16


def _zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


Q, KEY, V = _zeros(B, T, N, H), _zeros(B, S, K, H), _zeros(B, S, K, H)


def _call(q=Q, k=KEY, v=V, **kwargs):
    return fkl_jax.attention(q, k, v, **kwargs)


def _ints(*shape):
    return _zeros(*shape, dtype=jnp.int32)


def _mod(function):
    return dict(score_mod=function)


def _mask(function):
    return dict(mask_mod=function)


def _prints(s, b, h, q_idx, kv_idx):
    jax.debug.print("score {}", s)
    return s


def _random(s, b, h, q_idx, kv_idx):
    return s + jax.random.normal(jax.random.key(0))


def _branches_in_python(s, b, h, q_idx, kv_idx):
    return s if q_idx > kv_idx else -s


ERRORS = {
    # --- query, key, value
    "query_rank": (dict(q=_zeros(T, N)), ValueError, "query", r"\(8, 4\)"),
    "key_rank": (dict(k=_zeros(S, K, H)), ValueError, "key", "12, 2, 16"),
    "value_rank": (dict(v=_zeros(S, K, H)), ValueError, "value", "12, 2, 16"),
    "batch": (dict(k=_zeros(3, S, K, H)), ValueError, "key", "3"),
    "value_batch": (dict(v=_zeros(3, S, K, H)), ValueError, "value", "3"),
    "kv_length": (dict(v=_zeros(B, S + 1, K, H)), ValueError, "value", "13"),
    "kv_heads": (dict(v=_zeros(B, S, 1, H)), ValueError, "value", "1"),
    "heads_divide": (
        dict(k=_zeros(B, S, 3, H), v=_zeros(B, S, 3, H)), ValueError, "4", "3",
    ),
    "more_kv_heads": (
        dict(k=_zeros(B, S, 8, H), v=_zeros(B, S, 8, H)), ValueError, "4", "8",
    ),
    "no_kv_heads": (
        dict(k=_zeros(B, S, 0, H), v=_zeros(B, S, 0, H)), ValueError, "0",
    ),
    "no_head_dim": (
        dict(q=_zeros(B, T, N, 0), k=_zeros(B, S, K, 0)), ValueError, "query", "0",
    ),
    "head_dim": (dict(k=_zeros(B, S, K, 8)), ValueError, "key", "8", "16"),
    "dtype_mixed": (
        dict(k=_zeros(B, S, K, H, dtype=jnp.bfloat16)), TypeError, "key", "bfloat16",
    ),
    "value_dtype": (
        dict(v=_zeros(B, S, K, H, dtype=jnp.float16)), TypeError, "value", "float16",
    ),
    "dtype_int": (
        dict(q=_ints(B, T, N, H), k=_ints(B, S, K, H), v=_ints(B, S, K, H)),
        TypeError, "query", "int32",
    ),
    "dtype_complex": (
        dict(q=Q.astype(complex), k=KEY.astype(complex), v=V.astype(complex)),
        TypeError, "query", "complex64",
    ),
    "not_an_array": (dict(q="query"), TypeError, "query"),
    "none": (dict(k=None), TypeError, "key"),
    # --- bias, scale, sinks
    "bias_rank": (dict(bias=_zeros(1, B, N, T, S)), ValueError, "bias", "1, 2, 4, 8"),
    "bias_shape": (dict(bias=_zeros(B, N, T, S + 1)), ValueError, "bias", "13"),
    "bias_heads": (dict(bias=_zeros(1, K, 1, 1)), ValueError, "bias", "2"),
    "bias_dtype": (dict(bias=_ints(1, 1, T, S)), TypeError, "bias", "int32"),
    "bias_bool": (
        dict(bias=_zeros(1, 1, T, S, dtype=bool)), TypeError, "bias", "bool",
    ),
    "scale_shape": (dict(scale=_zeros(N)), ValueError, "scale", r"\(4,\)"),
    "scale_nan": (dict(scale=float("nan")), ValueError, "scale", "nan"),
    "scale_inf": (dict(scale=float("inf")), ValueError, "scale", "inf"),
    "scale_numpy": (dict(scale=np.float32("inf")), ValueError, "scale", "inf"),
    "scale_kind": (dict(scale="1"), TypeError, "scale"),
    "sinks_shape": (dict(sinks=_zeros(K)), ValueError, "sinks", r"\(2,\)"),
    "sinks_dtype": (dict(sinks=_ints(N)), TypeError, "sinks", "int32"),
    # --- lengths, segment ids, offsets
    "q_lengths_shape": (
        dict(q_seq_lengths=_ints(3)), ValueError, "q_seq_lengths", r"\(3,\)",
    ),
    "kv_lengths_shape": (
        dict(kv_seq_lengths=_ints(B, 1)), ValueError, "kv_seq_lengths", r"\(2, 1\)",
    ),
    "kv_lengths_dtype": (
        dict(kv_seq_lengths=_zeros(B)), TypeError, "kv_seq_lengths", "float32",
    ),
    "segments_alone": (
        dict(q_segment_ids=_ints(B, T)), ValueError, "kv_segment_ids",
    ),
    "kv_segments_alone": (
        dict(kv_segment_ids=_ints(B, S)), ValueError, "q_segment_ids",
    ),
    "segments_shape": (
        dict(q_segment_ids=_ints(B, T + 1), kv_segment_ids=_ints(B, S)),
        ValueError, "q_segment_ids", r"\(2, 9\)",
    ),
    "kv_segments_shape": (
        dict(q_segment_ids=_ints(B, T), kv_segment_ids=_ints(B, T)),
        ValueError, "kv_segment_ids", r"\(2, 8\)",
    ),
    "segments_dtype": (
        dict(q_segment_ids=_zeros(B, T), kv_segment_ids=_zeros(B, S)),
        TypeError, "q_segment_ids", "float32",
    ),
    "q_offset_shape": (dict(q_offset=_ints(3)), ValueError, "q_offset", r"\(3,\)"),
    "kv_offset_dtype": (dict(kv_offset=1.5), TypeError, "kv_offset"),
    "q_offset_wide": (
        dict(q_offset=2**40), ValueError, "q_offset", "1099511627776", "int32",
    ),
    "lengths_wide": (
        dict(kv_seq_lengths=np.asarray([2**40, 3])), ValueError, "kv_seq", "int32",
    ),
    # --- causal
    "causal_ambiguous": (
        dict(causal=True), ValueError, "causal", "top_left", "bottom_right",
    ),
    "causal_word": (dict(causal="left"), ValueError, "causal", "left", "top_left"),
    "causal_kind": (dict(causal=2.0), (TypeError, ValueError), "causal", "2.0"),
    "causal_top_left_offset": (
        dict(causal="top_left", q_offset=3), ValueError, "causal", "offset",
    ),
    "causal_bottom_right_offset": (
        dict(causal="bottom_right", kv_offset=3), ValueError, "causal", "offset",
    ),
    # --- block masks
    "block_mask_other_length": (
        dict(block_mask=fkl_jax.BlockMask(_zeros(1, 1, 3, 2, dtype=bool), 4, 8)),
        ValueError, "block_mask", "3", "2",
    ),
    "block_mask_other_heads": (
        dict(block_mask=fkl_jax.BlockMask(_zeros(1, 3, 2, 2, dtype=bool), 4, 8)),
        ValueError, "block_mask", "3",
    ),
    "block_mask_other_batch": (
        dict(block_mask=fkl_jax.BlockMask(_zeros(7, 2, 2, dtype=bool), 4, 8)),
        ValueError, "block_mask", "7", "8",
    ),
    "block_mask_array": (
        dict(block_mask=_zeros(1, 1, 2, 2, dtype=bool)), TypeError, "BlockMask",
    ),
    # --- mods
    "mod_too_few": (_mod(lambda s, b, h: s), (TypeError, ValueError), "score_mod"),
    "mod_too_many": (
        _mod(lambda s, b, h, q, kv, x, y: s), (TypeError, ValueError), "score_mod",
    ),
    "mask_with_score": (
        _mask(lambda s, b, h, q, kv: q < kv), (TypeError, ValueError), "mask_mod",
    ),
    "mod_bool": (
        _mod(lambda s, b, h, q, kv: q < kv), TypeError, "score_mod", "bool", "mask_mod",
    ),
    "mod_int": (_mod(lambda s, b, h, q, kv: q - kv), TypeError, "score_mod", "int32"),
    "mod_array": (
        _mod(lambda s, b, h, q, kv: s + jnp.zeros(3)),
        (TypeError, ValueError), "score_mod", r"\(3,\)",
    ),
    "mod_tuple": (
        _mod(lambda s, b, h, q, kv: (s, s)), (TypeError, ValueError), "score_mod",
    ),
    "mod_none": (
        _mod(lambda s, b, h, q, kv: None), (TypeError, ValueError), "score_mod",
    ),
    "mod_not_callable": (_mod(3), TypeError, "score_mod", "3"),
    "mod_in_list": (_mod((fkl_jax.SoftCap(1.0), 3)), TypeError, "score_mod", "3"),
    "mask_float": (
        _mask(lambda b, h, q, kv: 1.0 * q), TypeError, "mask_mod", "float32",
    ),
    "mask_int": (_mask(lambda b, h, q, kv: q), TypeError, "mask_mod", "int32"),
    "mask_none_combined": (
        _mask(fkl_jax.Causal() & (lambda b, h, q, kv: None)), TypeError, "None",
    ),
    "mask_not_callable": (_mask("causal"), TypeError, "mask_mod", "causal"),
    "mask_is_score_mod": (_mask(fkl_jax.SoftCap(1.0)), TypeError, "mask_mod"),
    "mod_random": (
        _mod(_random), (ValueError, NotImplementedError), "score_mod|random",
    ),
    "mod_print": (
        _mod(_prints), (ValueError, NotImplementedError), "score_mod|print|effect",
    ),
    "mod_branches": (
        _mod(_branches_in_python), (TypeError, ValueError), "jnp.where|branch|bool",
    ),
    # --- names
    "implementation": (
        dict(implementation="cuda"), ValueError, "implementation", "cuda", "ffi", "xla",
    ),
    "unknown_argument": (dict(window=3), TypeError, "window"),
    "precision": (dict(precision="best"), ValueError, "precision", "best"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    kwargs, kind, *words = ERRORS[name]
    with pytest.raises(kind, match="(?s)" + ".*".join(words)):
        _call(**kwargs)


@pytest.mark.parametrize("name", ["heads_divide", "mod_bool", "causal_ambiguous"])
def test_error_inside_jit_is_the_same(name):
    kwargs, kind, *words = ERRORS[name]
    with pytest.raises(kind, match="(?s)" + ".*".join(words)):
        jax.jit(lambda x: _call(**{"q": x, **kwargs}))(Q)


CONSTRUCTORS = {
    "window_negative": (lambda: fkl_jax.SlidingWindow(-1), ValueError, "left", "-1"),
    "window_right": (lambda: fkl_jax.SlidingWindow(1, -2), ValueError, "right", "-2"),
    "window_last": (lambda: fkl_jax.SlidingWindow.last(0), ValueError, "0"),
    "window_wide": (
        lambda: fkl_jax.SlidingWindow(sys.maxsize), ValueError, "left", "int32",
    ),
    "window_float": (lambda: fkl_jax.SlidingWindow(1.5), TypeError, "left"),
    "prefix_float": (lambda: fkl_jax.PrefixLM(1.5), TypeError, "length"),
    "padding_float": (lambda: fkl_jax.Padding(_zeros(2)), TypeError, "lengths"),
    "padding_rank": (lambda: fkl_jax.Padding(_ints(2, 2)), ValueError, "lengths"),
    "segments_float": (lambda: fkl_jax.SegmentIds(_zeros(2)), TypeError, "float32"),
    "dense_rank": (
        lambda: fkl_jax.DenseMask(_zeros(3, dtype=bool)), ValueError, r"\(3,\)",
    ),
    "dense_dtype": (lambda: fkl_jax.DenseMask(_zeros(3, 3)), TypeError, "float32"),
    "relative_even": (
        lambda: fkl_jax.RelativeBias(_zeros(N, 4)), ValueError, "table", "4",
    ),
    "relative_rank": (
        lambda: fkl_jax.RelativeBias(_zeros(1, N, 5)), ValueError, "table",
    ),
    "alibi_rank": (lambda: fkl_jax.ALiBi(_zeros(2, N)), ValueError, "slopes"),
    "score_mod_function": (lambda: fkl_jax.ScoreMod(3), TypeError, "ScoreMod", "3"),
    "mask_mod_function": (lambda: fkl_jax.MaskMod("x"), TypeError, "MaskMod", "x"),
    "compose": (lambda: fkl_jax.Causal() & 3, TypeError, "3", "MaskMod"),
    "block_rank": (
        lambda: fkl_jax.BlockMask(_zeros(2, 2, dtype=bool)), ValueError, r"\(2, 2\)",
    ),
    "block_dtype": (
        lambda: fkl_jax.BlockMask(_zeros(1, 1, 2, 2)), TypeError, "float32",
    ),
    "block_q": (
        lambda: fkl_jax.BlockMask(_zeros(1, 2, 2, dtype=bool), block_q=0),
        ValueError, "block_q", "0",
    ),
    "block_kv": (
        lambda: fkl_jax.BlockMask(_zeros(1, 2, 2, dtype=bool), block_kv=-3),
        ValueError, "block_kv", "-3",
    ),
    "builder_length": (
        lambda: fkl_jax.BlockMask.causal(8.5, 8), TypeError, "q_len", "8.5",
    ),
    "builder_heads": (
        lambda: fkl_jax.BlockMask.from_mask_mod(fkl_jax.Causal(), 8, 8, heads=-1),
        ValueError, "heads", "-1",
    ),
    "block_traced": (
        lambda: jax.jit(
            lambda n: fkl_jax.BlockMask(_zeros(1, 2, 2, dtype=bool), block_q=n).mask
        )(3),
        TypeError, "block_q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructor_error(name):
    make, kind, *words = CONSTRUCTORS[name]
    with pytest.raises(kind, match="(?s)" + ".*".join(words)):
        make()


@pytest.mark.parametrize(
    "mod,words",
    [
        (lambda: fkl_jax.ALiBi(_zeros(N + 1)), ["slopes", "5", "4"]),
        (lambda: fkl_jax.RelativeBias(_zeros(N + 1, 5)), ["table", "5", "4"]),
    ],
)
def test_per_head_parameters_must_have_one_row_per_head(mod, words):
    """A load would clamp: the last heads would quietly share a slope."""
    with pytest.raises(ValueError, match="(?s)" + ".*".join(words)):
        _call(score_mod=mod())


@pytest.mark.parametrize(
    "mask,words",
    [
        (lambda: fkl_jax.Padding(_ints(B + 1)), ["lengths", "3", "2"]),
        (lambda: fkl_jax.PrefixLM(_ints(B + 1)), ["length", "3", "2"]),
        (lambda: fkl_jax.DenseMask(_zeros(T, S + 1, dtype=bool)), ["13", "12"]),
        (lambda: fkl_jax.DenseMask(_zeros(B, 3, T, S, dtype=bool)), ["3", "4"]),
        (lambda: fkl_jax.SegmentIds(_ints(B + 1, T), _ints(B + 1, S)), ["3", "2"]),
    ],
)
def test_arrays_of_mask_mods_must_fit_the_call(mask, words):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(words)):
        _call(mask_mod=mask())


# --------------------------------------------------- valid requests that nobody takes


def _sorts(table):
    def mod(s, b, h, q_idx, kv_idx):
        return s + jnp.sort(table)[kv_idx]

    return mod


def test_primitive_that_no_program_has_raises_under_ffi():
    with pytest.raises(NotImplementedError, match=r"(?s)sort.*test_errors\.py"):
        _call(score_mod=_sorts(_zeros(S)), implementation="ffi")


def test_primitive_that_no_program_has_falls_to_pure_jax_with_one_warning(monkeypatch):
    monkeypatch.setattr(_backends, "_announced", set())  # as in a new process
    mod = _sorts(jnp.arange(S, dtype=jnp.float32)[::-1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = _call(score_mod=mod)
        _call(score_mod=mod)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1 and "sort" in texts[0], texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for by name: nothing to warn about
        expected = _call(score_mod=mod, implementation="xla")
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_float64_under_ffi_names_the_reason():
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in (Q, KEY, V))
        with pytest.raises(NotImplementedError, match="(?s)ffi.*float64"):
            _call(q, k, v, implementation="ffi")


@pytest.fixture(name="without_library", params=["missing", "too_new"])
def _without_library(request, monkeypatch):
    """Yield words of the reason, with the extension gone or made for a newer jaxlib."""
    if request.param == "missing":
        monkeypatch.delattr(fkl_jax, "_ext", raising=False)
        monkeypatch.setitem(sys.modules, "fkl_jax._ext", None)
        words = ["_ext", "cannot be imported", "reinstall"]
    else:
        monkeypatch.setattr(_ffi, "runtime_api_version", lambda: (0, 0))
        words = [r"built for XLA FFI \d+\.\d+", "0.0", "upgrade jaxlib or rebuild"]
    monkeypatch.setattr(_backends, "_announced", set())
    _ffi.register.cache_clear()
    yield "(?s)" + ".*".join(words)
    monkeypatch.undo()
    _ffi.register.cache_clear()


def test_without_library_ffi_raises_with_the_reason(without_library):
    with pytest.raises(NotImplementedError, match=without_library):
        _call(implementation="ffi")


def test_without_library_none_falls_to_pure_jax_with_one_warning(without_library):
    q = jax.random.normal(jax.random.key(0), Q.shape)
    with pytest.warns(fkl_jax.FallbackWarning, match=without_library) as caught:
        out = _call(q)
        _call(q)
    assert len(caught) == 1
    np.testing.assert_array_equal(out, _call(q, implementation="xla"))


# -------------------------------------------------------------------------- aftermath


def test_process_is_usable_after_failing_calls():
    key = jax.random.key(0)
    q = jax.random.normal(key, Q.shape)
    k = v = jax.random.normal(key, KEY.shape)
    before = _call(q, k, v, score_mod=fkl_jax.SoftCap(2.0))
    for kwargs, kind, *_ in ERRORS.values():
        for _ in range(2):  # the second time from whatever was cached
            with pytest.raises(kind):
                _call(**kwargs)
    after = _call(q, k, v, score_mod=fkl_jax.SoftCap(2.0))
    np.testing.assert_array_equal(before, after)


def test_gradient_of_integers_is_float0():
    lengths = jnp.full((B,), 5, jnp.int32)
    _, vjp = jax.vjp(lambda n: _call(kv_seq_lengths=n), lengths)
    (grad,) = vjp(_zeros(B, T, N, H))
    assert grad.dtype == jax.dtypes.float0


def test_import_is_silent_and_starts_no_backend():
    # Private, as there is no public way to ask: jax.devices() would start one.
    code = (
        "import jax, fkl_jax; from jax._src import xla_bridge as x;"
        "assert not x._backends, x._backends"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr
