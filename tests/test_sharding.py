"""Sharded calls against one device: values, gradients, and what is communicated."""

import contextlib
import functools
import math

import catalogue
import jax
import jax.numpy as jnp
import pytest
from cases import Case, call, make_problem
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from sharding import (
    Layout,
    arrays_of,
    assert_close,
    collectives,
    compile_step,
    make_step,
    sums_needed,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")


def _case(**changes) -> Case:
    """A call with everything in it."""
    defaults = dict(
        batch=(4,), q_seq_len=6, kv_seq_len=9, num_q_heads=8, num_kv_heads=4,
        head_dim=8, value_head_dim=4, causal="bottom_right", bias="BNS", sinks=True,
        score_mods=("alibi", "own_score_mod", "soft_cap"),
        mask_mods=("per_head_function", "dense_one_head"), block_mask="per_head",
        segment_ids=True, lengths="qk", scale=0.4, traced_scale=True,
    )  # fmt: skip
    return Case(**{**defaults, **changes})


def _on(layout: Layout, mesh):
    return jax.set_mesh(mesh) if layout.explicit else contextlib.nullcontext()


def _check(case: Case, layout: Layout, implementation: str = "ffi") -> None:
    problem = make_problem(case)
    step = make_step(case, implementation)
    arrays = arrays_of(problem)
    want = compile_step(step, *jax.tree.map(jnp.asarray, arrays))(
        *jax.tree.map(jnp.asarray, arrays)
    )
    mesh = layout.make_mesh()
    with _on(layout, mesh):
        operands = [layout.put(mesh, case, x) for x in arrays]
        compiled = compile_step(step, *operands)
        got = compiled(*operands)
        forward = compile_step(
            lambda f, o: call(case, implementation, f, o), *operands[:2]
        )
    assert_close(jax.device_get(got), jax.device_get(want))
    if implementation == "ffi":
        assert collectives(forward) == []
        needed = sums_needed(case, layout, problem.floats)
        found = collectives(compiled)
        if layout.explicit and case.sinks and layout.heads and not layout.parameters:
            # XLA makes the gradient of the sinks, whose type says that it is whole.
            found = [kind for kind in found if kind != "all-gather"]
        # XLA may sum the gradient of the sinks axis by axis.
        assert set(found) <= {"all-reduce"}, needed
        assert len(found) <= len(needed) + case.sinks, needed
        assert bool(found) == bool(needed)


X, XY = (("x", 8),), (("x", 4), ("y", 2))
LAYOUTS = {
    "batch": Layout(mesh=XY, heads=(), batch=(("x",),)),
    "batch over two axes": Layout(mesh=(("x", 2), ("y", 2), ("z", 2)),
                                  batch=(("x", "y"),), heads=("z",), kv_heads=("z",)),
    "batch and heads": Layout(kv_heads=("y",)),
    "batch and heads, parameters too": Layout(kv_heads=("y",), parameters=True),
    "heads first": Layout(batch=(("y",),), heads=("x",), kv_heads=("x",),
                          parameters=True),
    "nothing": Layout(batch=((),), heads=()),
}  # fmt: skip


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, explicit):
    layout = LAYOUTS[name]
    _check(_case(), Layout(**{**vars(layout), "explicit": explicit}))


@pytest.mark.parametrize(
    "heads,kv_heads,mesh,axes,kv_axes",
    [
        (8, 1, X, ("x",), ()),
        (8, 2, X, ("x",), ()),  # two key heads, each read by four devices
        (6, 3, (("x", 2), ("y", 2)), ("x",), ()),  # a device reads one and a half
        (12, 6, (("x", 4),), ("x",), ()),
        (8, 2, (("x", 2), ("y", 4)), ("x", "y"), ("x",)),
        (8, 8, X, ("x",), ("x",)),
    ],
)
def test_more_devices_than_key_heads(heads, kv_heads, mesh, axes, kv_axes):
    case = _case(num_q_heads=heads, num_kv_heads=kv_heads)
    _check(case, Layout(mesh=mesh, batch=((),), heads=axes, kv_heads=kv_axes))


def test_two_batch_axes():
    case = _case(batch=(2, 4), score_mods=("captured_half_table",), bias="N")
    layout = Layout(batch=(("y",), ("x",)), heads=(), parameters=True)
    _check(case, layout)
    _check(case, Layout(batch=((), ("x",)), heads=("y",), parameters=True))
    _check(case, Layout(batch=(("y",), ()), heads=("x",), parameters=True))


# ---------------------------------------------------------------------- at random


@st.composite
def sharded_cases(draw) -> tuple[Case, Layout]:
    mesh = draw(
        st.sampled_from(
            [X, XY, (("x", 2), ("y", 4)), (("x", 2), ("y", 2), ("z", 2)), (("x", 3),)]
        )
    )
    axes = draw(st.permutations([name for name, _ in mesh]))
    ends = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=3, max_size=3)))
    num_batch = draw(st.sampled_from([1, 1, 2]))
    batch = (tuple(axes[: ends[0]]), tuple(axes[ends[0] : ends[1]]))[:num_batch]
    heads = tuple(axes[ends[1] : ends[2]])
    size = dict(mesh)

    def count(names):
        return math.prod(size[a] for a in names)

    num_kv = draw(st.sampled_from([1, 2, 3, count(heads)]))
    num_q = num_kv * draw(st.integers(1, 3))
    num_q *= count(heads) // math.gcd(num_q, count(heads))
    kv_axes = heads if num_kv % count(heads) == 0 else ()

    def some(names, most):
        return tuple(draw(st.lists(st.sampled_from(names), max_size=most)))

    scores = [n for n, e in catalogue.SCORE_MODS.items() if e.refused is None]
    layout = Layout(
        mesh=mesh,
        batch=batch,
        heads=heads,
        kv_heads=kv_axes,
        parameters=draw(st.booleans()),
        explicit=draw(st.booleans()),
    )
    equal = draw(st.booleans())
    length = draw(st.integers(1, 12))
    offsets = draw(st.sampled_from([None, None, "scalar", "batch"]))
    case = Case(
        batch=tuple(count(b) * draw(st.sampled_from([1, 1, 2])) for b in batch),
        q_seq_len=length,
        kv_seq_len=length if equal else draw(st.integers(1, 12)),
        num_q_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=draw(st.sampled_from([4, 8])),
        value_head_dim=draw(st.sampled_from([4, 8])),
        causal=draw(st.sampled_from([False, True] if offsets else [False, "top_left"])),
        traced_scale=draw(st.booleans()),
        scale=0.3,
        bias=draw(st.sampled_from([None, "BNTS", "NS", "B", "TS"])),
        score_mods=some(sorted(scores), 2),
        mask_mods=some(sorted(catalogue.MASK_MODS), 2),
        block_mask=draw(st.sampled_from([None, None, "per_head", "one_head", "holes"])),
        segment_ids=draw(st.booleans()),
        lengths=draw(st.sampled_from(["", "q", "k", "qk"])),
        offsets=offsets,
        sinks=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, layout


def _sweep(examples: int, part: int):
    @seed(part)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(drawn=sharded_cases())
    def test(drawn):
        _check(*drawn)

    return test


for _part in range(4):
    globals()[f"test_random_layouts_{_part}"] = _sweep(5, _part)
for _part in range(10):
    globals()[f"test_many_random_layouts_{_part}"] = pytest.mark.long(
        _sweep(40, 100 + _part)
    )
