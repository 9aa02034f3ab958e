"""16-bit elements and head dims from 48 on: what a GPU of compute capability 9.0 takes
by TMA and wgmma. Lengths are a few tiles and never a multiple of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, check_case, make_problem, run_backend

import fkl_jax

# Lengths beyond two tiles of 128; some blocks have a predecessor and a successor.
SIZES = dict(q_seq_len=300, kv_seq_len=429, batch=(1,), dtype="bfloat16")


def _case(name: str, head_dim: int = 128, **changes) -> Case:
    changes.setdefault("value_head_dim", head_dim)
    return Case(name=name, head_dim=head_dim, **{**SIZES, **changes})


MASKS = {
    "plain": dict(),
    "causal": dict(causal="bottom_right"),
    "top_left": dict(causal="top_left", q_seq_len=429, kv_seq_len=300),
    "window": dict(mask_mods=("window",), poison=True),
    "segments": dict(segment_ids=True, causal="top_left", poison=True),
    "lengths": dict(lengths="qk", poison=True, batch=(3,)),
    "blocks": dict(block_mask="holes", block_q=64, block_kv=128, poison=True),
    "small_blocks": dict(block_mask="per_head", block_q=40, block_kv=24),
    "multi_query": dict(num_kv_heads=1, causal="top_left"),
    "scale": dict(traced_scale=True, scale=-0.3, causal="top_left", sinks=True),
}
PROGRAMS = {
    "soft_cap": dict(score_mods=("soft_cap",), causal="top_left"),
    "alibi": dict(score_mods=("alibi",), causal="top_left"),
    "table": dict(score_mods=("captured_table",)),
    "bias": dict(bias="NTS"),
    "bias_keys": dict(bias="S", lengths="k", batch=(2,)),
}
CASES = [
    *(_case(f"{name}_128", **changes) for name, changes in (MASKS | PROGRAMS).items()),
    *(
        _case(f"{name}_{d}", d, **MASKS[name])
        for d in (64, 256)
        for name in ("plain", "causal", "window", "segments", "lengths", "multi_query")
    ),
    *(_case(f"{name}_64", 64, **PROGRAMS[name]) for name in ("soft_cap", "bias")),
    *(_case(f"{name}_256", 256, **PROGRAMS[name]) for name in ("alibi", "bias")),
    *(_case(f"causal_{d}", d, causal="top_left") for d in (48, 80, 96, 160)),
    _case("wider_values", 64, value_head_dim=128, causal="top_left"),
    _case("narrower_values", 128, value_head_dim=72, mask_mods=("window",)),
    _case("float16", 96, dtype="float16", causal="top_left", score_mods=("soft_cap",)),
]
DETERMINISTIC = [
    *(_case(f"{name}_128", **changes) for name, changes in MASKS.items()),
    *(
        _case(f"{name}_{d}", d, **MASKS[name])
        for d in (64, 96)
        for name in ("causal", "window", "scale")
    ),
    _case("causal_256", 256, causal="top_left"),
    *(_case(f"bias_{d}", d, bias="BNTS", lengths="k") for d in (64, 128, 256)),
]


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case, backend):
    check_case(case, backend)


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_gradients_of_deterministic_calls_repeat(case, backend):
    case = dataclasses.replace(case, deterministic=True)
    check_case(case, backend)
    problem = make_problem(dataclasses.replace(case, poison=False))
    first = run_backend(problem, backend)
    for _ in range(3):
        again = run_backend(problem, backend)
        jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("launches", [100, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_many_launches_are_the_same_bits(
    head_dim, causal, launches, backend
):
    """With more blocks than multiprocessors, so that the order of additions would
    change from launch to launch."""
    case = Case(
        q_seq_len=2000,
        kv_seq_len=2000,
        batch=(2,),
        num_q_heads=12,
        num_kv_heads=6,
        head_dim=head_dim,
        value_head_dim=head_dim,
        causal=causal,
        dtype="bfloat16",
        deterministic=True,
    )
    shapes = {
        "query": (*case.batch, case.q_seq_len, case.num_q_heads, head_dim),
        "key": (*case.batch, case.kv_seq_len, case.num_kv_heads, head_dim),
    }
    shapes |= {"value": shapes["key"], "dout": shapes["query"]}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 4), strict=True))
    q, k, v, dout = (
        jax.random.normal(keys[name], shape, jnp.bfloat16)
        for name, shape in shapes.items()
    )

    def attend(q, k, v):
        return fkl_jax.attention(
            q, k, v, causal=causal, deterministic=True, implementation=backend
        )

    @jax.jit
    def gradients(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    @jax.jit
    def count_differences(a, b):
        differs = [jnp.any(x != y) for x, y in zip(a, b, strict=True)]
        return sum(d.astype(jnp.int32) for d in differs)

    first = gradients(q, k, v, dout)
    assert all(bool(jnp.isfinite(x).all()) for x in first)
    different = jnp.zeros((), jnp.int32)
    for _ in range(launches):
        different += count_differences(gradients(q, k, v, dout), first)
    assert int(different) == 0
