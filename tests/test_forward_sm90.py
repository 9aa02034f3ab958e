"""Forwards with more query tiles than a GPU has multiprocessors: on compute capability
9.0 a block works on several, and each begins while the one before still ends.

Lengths are a few tiles and never a multiple of one; some query tiles have no live key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, call, make_problem, poisoned, run_dense

SIZES = dict(
    batch=(5,),
    num_q_heads=10,
    num_kv_heads=5,
    q_seq_len=429,
    kv_seq_len=300,
    dtype="bfloat16",
)


def _case(name: str, head_dim: int = 128, **changes) -> Case:
    changes.setdefault("value_head_dim", head_dim)
    return Case(name=name, head_dim=head_dim, **{**SIZES, **changes})


MASKS = {
    "plain": dict(),
    "causal": dict(causal="top_left"),
    "empty_rows": dict(causal="bottom_right", kv_seq_len=200),
    "lengths": dict(lengths="qk", poison=True),
    "lengths_causal": dict(lengths="qk", causal=True, poison=True, seed=5),
    "segments": dict(segment_ids=True, poison=True),
    "segments_causal": dict(segment_ids=True, causal=True, lengths="k", poison=True),
    "window": dict(mask_mods=("window",), poison=True),
    "grows": dict(causal="top_left", query_gain=12.0),
    "scale": dict(traced_scale=True, scale=-0.3, causal="top_left", sinks=True),
}
CASES = [
    *(_case(f"{name}_{d}", d, **x) for d in (64, 128) for name, x in MASKS.items()),
    *(
        _case(name, **changes)
        for name, changes in {
            "kill_rows": dict(mask_mods=("kill_rows",), poison=True),
            "nothing_live": dict(mask_mods=("nothing",), sinks=True),
            "offsets": dict(causal=True, offsets="batch"),
            "blocks": dict(block_mask="dead", block_q=128, block_kv=128, poison=True),
            "small_blocks": dict(block_mask="per_head", block_q=40, block_kv=24),
            "many_blocks": dict(
                block_mask="holes",
                block_q=64,
                block_kv=64,
                q_seq_len=700,
                kv_seq_len=1100,
                num_q_heads=5,
            ),
            "soft_cap": dict(score_mods=("soft_cap",), causal="top_left"),
            "bias": dict(bias="NTS", lengths="k"),
            "one_key": dict(kv_seq_len=1),
            "one_tile": dict(kv_seq_len=100, num_kv_heads=10, causal=True),
        }.items()
    ),
    *(_case(f"causal_{d}", d, causal="top_left") for d in (96, 192, 256)),
    _case("narrower_values", 192, value_head_dim=128, mask_mods=("window_last",)),
    _case("float16", dtype="float16", causal="top_left", query_gain=4.0),
]


@pytest.mark.backends("cuda")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_of_many_query_tiles(case, backend):
    problem = make_problem(case)
    floats = poisoned(problem) if case.poison else problem.floats
    operands = jax.tree.map(jnp.asarray, (floats, problem.others))
    step = jax.jit(lambda floats, others: call(case, backend, floats, others))
    out, lse = jax.tree.map(np.asarray, step(*operands))
    exact, _, _, score_size = run_dense(problem, backward=False)
    storage = np.dtype(case.dtype)
    plain, *_ = run_dense(problem, np.float32, storage, backward=False)
    value_size = float(np.max(abs(problem.floats["value"].astype(np.float64))))
    oracle.assert_close(
        out, exact[0], plain[0], value_size,
        factor=2, score_size=score_size, what="out",
    )  # fmt: skip
    oracle.assert_close(
        lse, exact[1], plain[1], 1 + score_size,
        factor=2, score_size=0.0, what="lse",
    )  # fmt: skip
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, step(*operands), (out, lse))
