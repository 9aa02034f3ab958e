"""One list of cases, run for each backend against the float64 oracle.

Each case is a forward pass and all gradients.  Sizes are chosen around the tiles of
the backends: below, at and beyond one tile of queries and of keys, never a multiple.
"""

import dataclasses

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments, check, check_case, make_problem, run_backend

import fkl_jax

CASES = [
    Case(name="plain"),
    Case(name="multi_query", num_kv_heads=1),
    Case(name="multi_head", num_kv_heads=4),
    Case(name="one_head", num_q_heads=1, num_kv_heads=1),
    Case(name="three_of_six_heads", num_q_heads=6, num_kv_heads=3),
    Case(name="no_batch", batch=()),
    Case(name="three_batch_axes", batch=(2, 1, 3), bias="BNTS", lengths="qk"),
    Case(name="odd_lengths", q_seq_len=67, kv_seq_len=131),
    Case(name="beyond_a_tile", q_seq_len=150, kv_seq_len=301, causal="bottom_right"),
    Case(name="more_queries", q_seq_len=140, kv_seq_len=9, causal="top_left"),
    Case(name="more_queries_bottom", q_seq_len=20, kv_seq_len=9, causal="bottom_right"),
    Case(name="one_query", q_seq_len=1, kv_seq_len=300),
    Case(name="one_key", q_seq_len=9, kv_seq_len=1),
    Case(name="one_query_one_key", q_seq_len=1, kv_seq_len=1, causal=True),
    Case(name="no_query", q_seq_len=0),
    Case(name="no_key", kv_seq_len=0, sinks=True),
    Case(name="no_key_no_sink", kv_seq_len=0),
    Case(name="no_query_no_key", q_seq_len=0, kv_seq_len=0, causal=True),
    Case(name="no_batch_element", batch=(0,), score_mods=("alibi",), bias="BNTS"),
    Case(name="head_dim_1", head_dim=1, value_head_dim=1),
    Case(name="head_dim_off_tile", head_dim=23, value_head_dim=37),
    Case(name="head_dim_256", head_dim=256, value_head_dim=256, num_q_heads=2),
    Case(name="value_head_wider", head_dim=8, value_head_dim=72),
    Case(name="value_head_narrower", head_dim=96, value_head_dim=5),
    Case(name="causal", causal=True),
    Case(name="causal_long", causal=True, q_seq_len=200, kv_seq_len=200),
    Case(name="causal_top_left", causal="top_left", q_seq_len=9),
    Case(name="causal_bottom_right", causal="bottom_right", q_seq_len=9),
    Case(name="causal_offset", causal=True, q_seq_len=5, offsets="scalar"),
    Case(name="causal_offset_batch", causal=True, q_seq_len=5, offsets="batch"),
    Case(name="lengths", lengths="qk", poison=True),
    Case(name="lengths_q", lengths="q", sinks=True, poison=True),
    Case(name="lengths_k", lengths="k", sinks=True, poison=True, kv_seq_len=200),
    Case(name="lengths_causal", lengths="qk", causal=True, poison=True, seed=3),
    Case(name="segments", segment_ids=True, poison=True),
    Case(name="segments_causal", segment_ids=True, causal=True, q_seq_len=13),
    Case(name="segments_lengths", segment_ids=True, lengths="qk", poison=True),
    Case(name="sinks", sinks=True, causal=True),
    Case(name="scale_0", scale=0.0, traced_scale=True, causal=True),
    Case(name="scale_negative", scale=-0.5, traced_scale=True),
    Case(name="scale_static", scale=1.25),
    Case(name="scale_static_0", scale=0.0),
    Case(name="lse_only", cotangents="lse", causal=True, score_mods=("soft_cap",)),
    Case(name="out_only", cotangents="out", causal=True, score_mods=("soft_cap",)),
    Case(name="deterministic", deterministic=True, causal=True, score_mods=("alibi",)),
    *(
        Case(name=f"bias_{pattern}", bias=pattern, batch=(3,), q_seq_len=9)
        for pattern in (
            "".join(x if keep & 1 << i else "" for i, x in enumerate("BNTS")) or "-"
            for keep in range(16)
        )
    ),
    Case(name="bias_bf16", bias="NTS", bias_dtype="bfloat16", dtype="bfloat16"),
    Case(name="bias_f32_in_bf16", bias="BNTS", dtype="bfloat16"),
    *(Case(name=f"score_{name}", score_mods=(name,)) for name in catalogue.SCORE_MODS),
    Case(
        name="score_mods_in_order",
        score_mods=("alibi", "soft_cap", "captured_table"),
        bias="NTS",
        causal=True,
    ),
    Case(
        name="score_mod_long_rows",
        score_mods=("alibi_soft_cap_function", "captured_full_bias"),
        q_seq_len=70,
        kv_seq_len=300,
        causal="bottom_right",
    ),
    Case(name="score_mod_offsets", score_mods=("own_score_mod",), offsets="batch"),
    *(Case(name=f"mask_{name}", mask_mods=(name,)) for name in catalogue.MASK_MODS),
    *(
        Case(
            name=f"mask_long_{name}",
            mask_mods=(name,),
            q_seq_len=140,
            kv_seq_len=270,
            num_q_heads=2,
            poison=True,
        )
        for name in ("causal", "window", "causal_and_not_window", "dense_4d", "padding")
    ),  # fmt: skip
    Case(name="masks_anded", mask_mods=("window", "dense_2d", "padding"), sinks=True),
    Case(name="mask_as_score_mod", mask_as_score=("window_last",)),
    Case(
        name="mask_between_score_mods",
        score_mods=("soft_cap",),
        mask_as_score=("causal", "dense_4d"),
    ),
    *(
        Case(name=f"block_{kind}", block_mask=kind, q_seq_len=19, kv_seq_len=37)
        for kind in ("causal", "holes", "per_head", "one_head", "checker", "dead")
    ),
    *(
        Case(
            name=f"block_size_{q}_{kv}",
            block_mask="holes",
            block_q=q,
            block_kv=kv,
            q_seq_len=70,
            kv_seq_len=150,
            num_q_heads=2,
            poison=True,
        )
        for q, kv in ((1, 1), (3, 50), (64, 7), (33, 128), (128, 128), (100, 200))
    ),  # fmt: skip
    Case(
        name="block_and_causal_and_mod",
        block_mask="holes",
        causal=True,
        score_mods=("soft_cap",),
        mask_mods=("window",),
        poison=True,
    ),
    Case(
        name="everything",
        batch=(2, 2),
        q_seq_len=45,
        kv_seq_len=77,
        causal="bottom_right",
        bias="BTS",
        score_mods=("alibi", "soft_cap"),
        mask_mods=("causal_or_prefix", "padding"),
        block_mask="holes",
        segment_ids=True,
        lengths="qk",
        sinks=True,
        scale=0.3,
        traced_scale=True,
        poison=True,
    ),
    # More than one tile, and parameters without gradients: cheap forms of programs.
    *(
        Case(
            name=f"run_{name}",
            batch=(1,),
            q_seq_len=150,
            kv_seq_len=333,
            num_q_heads=2,
            num_kv_heads=1,
            fixed_mods=True,
            **{
                "dtype": "bfloat16",
                "head_dim": head_dim,
                "value_head_dim": head_dim,
                "causal": "bottom_right",
                **changes,
            },
        )
        for name, head_dim, changes in (
            ("cap_20", 64, dict(score_mods=("soft_cap_20",))),
            ("cap_20_large", 64, dict(score_mods=("soft_cap_20",), query_gain=8.0)),
            ("cap_20_huge", 128, dict(score_mods=("soft_cap_20",), query_gain=1e4)),
            ("cap_20_128", 128, dict(score_mods=("soft_cap_20",))),
            ("cap_50_128", 128, dict(score_mods=("soft_cap_50",), query_gain=4.0)),
            ("cap_50_full", 128, dict(score_mods=("soft_cap_50",), causal=False)),
            ("cap_20_256", 256, dict(score_mods=("soft_cap_20",))),
            ("cap_20_half", 128, dict(score_mods=("soft_cap_20",), dtype="float16")),
            ("alibi", 64, dict(score_mods=("alibi",))),
            ("alibi_128", 128, dict(score_mods=("alibi",))),
            ("alibi_256", 256, dict(score_mods=("alibi",))),
            ("alibi_half", 128, dict(score_mods=("alibi",), dtype="float16")),
            ("alibi_full", 128, dict(score_mods=("alibi",), causal=False)),
            (
                "alibi_offsets",
                128,
                dict(score_mods=("alibi",), offsets="scalar", causal=True),
            ),
            (
                "alibi_masks",
                64,
                dict(
                    score_mods=("alibi",),
                    mask_mods=("window",),
                    lengths="qk",
                    segment_ids=True,
                    poison=True,
                    sinks=True,
                ),
            ),
            (
                "alibi_cap",
                128,
                dict(score_mods=("alibi_soft_cap_function",), query_gain=0.3),
            ),
            ("alibi_then_cap", 64, dict(score_mods=("alibi", "soft_cap_50"))),
            ("relative_bias", 128, dict(score_mods=("relative_bias",))),
            ("temperature", 128, dict(score_mods=("temperature",))),
            ("own", 64, dict(score_mods=("own_score_mod",))),
        )
    ),
    *(
        Case(name=f"{dtype}_{name}", dtype=dtype, **changes)
        for dtype in ("bfloat16", "float16")
        for name, changes in {
            "plain": dict(),
            "causal": dict(causal=True, q_seq_len=70, kv_seq_len=70),
            "mod": dict(score_mods=("soft_cap", "alibi"), bias="NTS"),
            "masks": dict(
                mask_mods=("window",),
                lengths="qk",
                poison=True,
                sinks=True,
                block_mask="holes",
            ),
            "odd": dict(q_seq_len=33, kv_seq_len=131, head_dim=23, value_head_dim=7),
        }.items()
    ),  # fmt: skip
]
assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mod", [(), ("alibi", "soft_cap")], ids=["plain", "mods"])
def test_float64(mod, causal, backend):
    case = Case(dtype="float64", score_mods=mod, causal=causal, lengths="k")
    problem = make_problem(case)
    with jax.enable_x64(True):
        if backend == "ffi":
            with pytest.raises(NotImplementedError, match="float64"):
                run_backend(problem, backend)
        else:
            check(problem, run_backend(problem, backend))


@pytest.mark.parametrize("name", ["plain", "everything", "no_key", "bfloat16_mod"])
def test_without_lse_out_is_the_same(name, backend):
    """Asking for the LSE changes nothing about `out`, jitted or not."""
    case = next(c for c in CASES if c.name == name)
    problem = make_problem(case)
    floats, others = jax.tree.map(jnp.asarray, (problem.floats, problem.others))
    kwargs = arguments(case, floats, others)
    qkv = floats["query"], floats["key"], floats["value"]
    out = fkl_jax.attention(*qkv, **kwargs, implementation=backend)
    with_lse, lse = fkl_jax.attention_with_lse(*qkv, **kwargs, implementation=backend)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(with_lse))
    assert lse.shape == (*case.batch, case.num_q_heads, case.q_seq_len)
    assert lse.dtype == jnp.float32
    (jitted, _), _ = run_backend(dataclasses.replace(problem), backend)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), jitted.astype(np.float32), rtol=2e-2, atol=1e-5
    )


@pytest.mark.parametrize("name", ["causal_long", "everything", "score_alibi"])
def test_bitwise_repeatable(name, backend):
    """The forward always is, gradients are with `deterministic=True`."""
    case = next(c for c in CASES if c.name == name)
    case = dataclasses.replace(case, deterministic=True, poison=False)
    problem = make_problem(case)
    first = run_backend(problem, backend)
    for _ in range(3):
        jax.tree.map(
            np.testing.assert_array_equal, run_backend(problem, backend), first
        )


def test_backends_agree_on_what_none_picks():
    """`implementation=None` is one of the backends, to the bit."""
    case = Case(causal=True, score_mods=("soft_cap",))
    problem = make_problem(case)
    (out, _), _ = run_backend(problem, None)
    candidates = [run_backend(problem, name)[0][0] for name in ("xla", "ffi")]
    assert any(np.array_equal(out, c) for c in candidates)
