"""The oracle itself: its gradients against central differences, its edges by hand."""

import dataclasses

import numpy as np
import pytest
from cases import Case, make_problem, run_dense
from catalogue import SCORE_MODS

BASE = Case(
    batch=(2,),
    q_seq_len=4,
    kv_seq_len=5,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=3,
    value_head_dim=2,
    dtype="float64",
    bias="BNTS",
    bias_dtype="float64",
    sinks=True,
    scale=0.7,
    traced_scale=True,
    mask_mods=("dense_4d",),
    lengths="qk",
)


def _loss(problem) -> float:
    (out, lse), *_ = run_dense(problem)
    dout, dlse = problem.cotangents
    return np.sum(out * dout) + np.sum(np.where(np.isfinite(lse), lse * dlse, 0))


@pytest.mark.parametrize("mod", [None, *SCORE_MODS])
def test_gradients_match_central_differences(mod):
    case = dataclasses.replace(BASE, score_mods=(mod,) if mod else ())
    problem = make_problem(case)
    floats = {k: v.astype(np.float64) for k, v in problem.floats.items()}
    problem = dataclasses.replace(problem, floats=floats)
    _, grads, *_ = run_dense(problem)
    rng = np.random.default_rng(1)
    for name, x in floats.items():
        direction = rng.standard_normal(x.shape)
        step = 1e-6

        def moved(sign, name=name, x=x, direction=direction, step=step):
            changed = {**floats, name: x + sign * step * direction}
            return _loss(dataclasses.replace(problem, floats=changed))

        difference = (moved(1) - moved(-1)) / (2 * step)
        expected = np.sum(grads[name] * direction)
        np.testing.assert_allclose(difference, expected, rtol=1e-6, atol=1e-8)


def test_rows_without_live_key():
    """Beyond a length nothing counts, not even a sink; a masked row keeps its sink."""
    case = Case(num_kv_heads=4, mask_mods=("nothing",), sinks=True, lengths="q")
    problem = make_problem(case)
    (out, lse), *_ = run_dense(problem)
    assert not out.any()
    rows = np.arange(case.q_seq_len) >= problem.others["q_seq_lengths"][:, None]
    rows = np.broadcast_to(rows[:, None], lse.shape)
    assert rows.any() and not rows.all()
    sinks = np.broadcast_to(problem.floats["sinks"][:, None], lse.shape)
    np.testing.assert_array_equal(lse[rows], -np.inf)
    np.testing.assert_allclose(lse[~rows], sinks[~rows], rtol=1e-15)
