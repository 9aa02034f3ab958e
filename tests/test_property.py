"""Random configurations over all features at once, against the oracle."""

import itertools

import catalogue
import jax
import pytest
from cases import Case, check_case
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

SETTINGS = dict(
    deadline=None,
    database=None,  # with a seed of its own each sweep is the same everywhere
    # Each example compiles a program of its own.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

SHORT = st.integers(1, 24)
LONG = st.sampled_from([31, 33, 63, 65, 70, 128, 129, 257, 300])
LENGTH = st.one_of(SHORT, SHORT, SHORT, LONG)
HEAD_DIM = st.sampled_from([1, 3, 8, 16, 17, 32, 40, 64])


@st.composite
def cases(draw) -> Case:
    """Draw a configuration; what it draws first is what shrinking keeps longest."""
    num_kv_heads = draw(st.integers(1, 3))
    q_seq_len, kv_seq_len = draw(LENGTH), draw(LENGTH)
    equal = draw(st.booleans())
    if equal:
        kv_seq_len = q_seq_len
    offsets = draw(st.sampled_from([None, None, "scalar", "batch"]))
    causal = draw(
        st.sampled_from(
            [False, True]
            if offsets
            else [False, True, "top_left", "bottom_right"]
            if equal
            else [False, "top_left", "bottom_right"]
        )
    )

    def some(names, most):
        return tuple(draw(st.lists(st.sampled_from(names), max_size=most)))

    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    scale = draw(st.sampled_from([None, None, 0.0, -0.4, 0.25]))
    return Case(
        batch=draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2)])),
        q_seq_len=q_seq_len,
        kv_seq_len=kv_seq_len,
        num_q_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(HEAD_DIM),
        value_head_dim=draw(HEAD_DIM),
        dtype=dtype,
        causal=causal,
        scale=scale,
        traced_scale=scale is not None and draw(st.booleans()),
        bias=draw(st.sampled_from([None, None, "-", "BNTS", "NTS", "TS", "NS", "B"])),
        bias_dtype=draw(st.sampled_from(["float32", dtype])),
        score_mods=some(sorted(catalogue.SCORE_MODS), 2),
        mask_mods=some(sorted(catalogue.MASK_MODS), 2),
        mask_as_score=some(["causal", "window", "dense_4d"], 1),
        block_mask=draw(
            st.sampled_from(
                [None, None, None, "holes", "per_head", "one_head", "causal", "dead"]
            )
        ),
        block_q=draw(st.sampled_from([1, 3, 4, 16, 64, 128])),
        block_kv=draw(st.sampled_from([1, 5, 8, 16, 64, 128])),
        segment_ids=draw(st.sampled_from([False, False, True])),
        lengths=draw(st.sampled_from(["", "", "q", "k", "qk"])),
        offsets=offsets,
        sinks=draw(st.booleans()),
        poison=draw(st.booleans()),
        cotangents=draw(st.sampled_from(["both", "both", "out", "lse"])),
        deterministic=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def _sweep(examples: int, part: int):
    """Return a test of `examples` configurations, others for another `part`.

    Parts are tests of their own so that `pytest -n` can spread them.
    """
    count = itertools.count(1)

    @seed(part)
    @settings(max_examples=examples, **SETTINGS)
    @given(case=cases())
    def test(case, backend):
        check_case(case, backend)
        if next(count) % 100 == 0:
            jax.clear_caches()  # every example leaves a compiled program behind

    return test


# The compiled backends get all parts, plain JAX a third: it has one code path.
_compiled = pytest.mark.backends("ffi", "cuda")
for _part in range(10):
    _test = _sweep(32, _part)
    globals()[f"test_random_configurations_{_part}"] = (
        _test if _part < 3 else _compiled(_test)
    )
# On a GPU, where each of these compiles kernels of its own, `test_random_cases.py` does
# the many.
_on_cpu = pytest.mark.backends("ffi", "xla")
for _part in range(20):
    globals()[f"test_many_random_configurations_{_part}"] = _on_cpu(
        pytest.mark.long(_sweep(100, 100 + _part))
    )
