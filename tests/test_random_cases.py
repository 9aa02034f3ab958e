"""Random configurations on the GPU, in sets that share their kernels.

pytest -m "gpu and long" -n 16 tests/test_random_cases.py      # 2,000 of them
"""

import collections

import cuda_calls
import jax
import pytest
from cases import check_case
from random_cases import draw_set

from fkl_jax._tuning import choose_plan, tune_key

NUM_PARTS, SETS_PER_PART, SET_SIZE = 80, 5, 5  # 2,000 configurations
HOPPER = cuda_calls.gpu("sm_90a")


def seed_of(part: int, number: int) -> int:
    return 1000 * part + number


@pytest.mark.parametrize("number", range(12))
def test_members_of_a_set_share_their_kernels(number):
    members = draw_set(seed_of(0, number), 3)
    assert len({repr(case) for case in members}) == 3
    glues = [[], []]
    for case in members:
        for texts, call in zip(glues, cuda_calls.calls(case), strict=True):
            texts.append(call.glue(HOPPER).text)
    for texts in glues:
        assert len(set(texts)) == 1


def test_every_kernel_is_reached():
    """A fair share of the sets reaches each kernel of compute capability 9.0."""
    count = collections.Counter()
    num_sets = 60
    for number in range(num_sets):
        (case,) = draw_set(seed_of(1, number), 1)
        for call in cuda_calls.calls(case):
            operands = call.spec.named(call.avals[: len(call.spec.operands)])
            plan = choose_plan(
                tune_key(
                    call.spec, operands, call.results, merged_query=True, gpu=HOPPER
                )
            )
            is_aligned = all(
                operands[role].shape[-1] * operands[role].dtype.itemsize % 16 == 0
                for role in ("query", "value")
            )
            if plan.unaligned is not None and not is_aligned:
                plan = plan.unaligned
            count.update(set(plan.functions))
    share = {name: n / num_sets for name, n in count.items()}
    assert share["forward_sm90"] > 0.25, share
    assert share["backward_keys_sm90"] > 0.25, share
    assert share["forward_sm80"] > 0.15, share
    assert share["backward_keys_sm80"] > 0.25, share
    assert share["backward_queries_sm80"] > 0.05, share
    assert share["decode_sm80"] > 0.15, share
    assert share["combine_splits"] > 0.03, share


@pytest.mark.long
@pytest.mark.backends("cuda")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_sets(part, backend):
    for number in range(SETS_PER_PART):
        for case in draw_set(seed_of(part, number), SET_SIZE):
            try:
                check_case(case, backend)
            except Exception as e:
                e.add_note(f"{case!r}")
                raise
    jax.clear_caches()  # every configuration leaves a compiled program behind
