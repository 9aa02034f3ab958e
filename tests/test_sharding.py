"""Sharded calls against one device: values, gradients, and what is communicated."""

import contextlib
import dataclasses
import hashlib
import math
import os
import subprocess
import sys

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMPILE_FAST, Case, call, make_problem
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding import (
    Layout,
    arrays_of,
    assert_close,
    collectives,
    compile_step,
    make_step,
    sharded_arrays_can_be_indexed,
    sums_needed,
)

import fkl_jax
from fkl_jax import _local_spec, _primitives, _reference

X, XY = (("x", 8),), (("x", 4), ("y", 2))


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


def _transformed(f, transform: str, is_mapped):
    """`f(floats, others, ...)` of the same results. Under vmap `is_mapped(name)` says
    which arrays have a leading axis."""
    if transform == "remat":
        policy = jax.checkpoint_policies.save_only_these_names("fkl_out")
        return jax.checkpoint(f, policy=policy)
    if transform != "vmap":
        return f

    def mapped(*operands):
        axes = [{n: 0 if is_mapped(n) else None for n in x} for x in operands]
        return jax.vmap(f, tuple(axes))(*operands)

    return mapped


def _check(
    case: Case, layout: Layout, implementation: str = "ffi", transform: str = ""
) -> None:
    """Compare with one device; under vmap with a loop over what is mapped."""
    problem = make_problem(case)
    step = make_step(case, implementation)
    count = 1
    if transform == "vmap":
        count = layout.size(layout.lead) if layout.lead else 2
    versions = [
        arrays_of(make_problem(dataclasses.replace(case, seed=case.seed + k)))
        for k in range(count)
    ]

    def is_mapped(name):
        # Any half of the arrays, and always the cotangents.
        half = int(hashlib.sha256(f"{case.seed} {name}".encode()).hexdigest(), 16) % 2
        return transform == "vmap" and (half == 0 or name in ("dout", "dlse"))

    def element(k):
        return [
            {n: jnp.asarray((versions[k] if is_mapped(n) else versions[0])[g][n])
             for n in group}
            for g, group in enumerate(versions[0])
        ]  # fmt: skip

    one = jax.jit(step, compiler_options=COMPILE_FAST)
    want = [jax.device_get(one(*element(k))) for k in range(count)]
    want = jax.tree.map(lambda *xs: np.stack(xs), *want) if count > 1 else want[0]
    if transform == "vmap" and count == 1:
        want = jax.tree.map(lambda x: x[None], want)
    mesh = layout.make_mesh()
    with _on(layout, mesh):
        operands = []
        for g, group in enumerate(versions[0]):
            placed = {}
            for n, x in group.items():
                spec = layout.spec(case, n, x.shape)
                if is_mapped(n):
                    x = np.stack([version[g][n] for version in versions])
                    spec = P(layout.lead or None, *spec)
                placed[n] = jax.device_put(x, NamedSharding(mesh, spec))
            operands.append(placed)
        compiled = compile_step(_transformed(step, transform, is_mapped), *operands)
        got = compiled(*operands)
        alone = _transformed(
            lambda f, o: call(case, implementation, f, o), transform, is_mapped
        )
        if any(is_mapped(n) for group in operands[:2] for n in group):
            forward = compile_step(alone, *operands[:2])
        else:
            forward = None
    assert_close(jax.device_get(got), want)
    if implementation == "ffi":
        assert forward is None or collectives(forward) == []
        needed = sums_needed(case, layout, problem.floats)
        found = collectives(compiled)
        if layout.explicit and case.sinks and layout.heads and not layout.parameters:
            # XLA makes the gradient of the sinks, whose type says that it is whole.
            found = [kind for kind in found if kind != "all-gather"]
        # XLA may sum the gradient of the sinks axis by axis.
        assert set(found) <= {"all-reduce"}, needed
        assert len(found) <= len(needed) + case.sinks, needed
        # That of whole sinks may stay divided.
        assert bool(found) or all(of_sinks for of_sinks, _ in needed), needed


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
        (8, 4, XY, ("y",), ()),  # whole, though they could be divided
        (8, 8, X, ("x",), ("x",)),
        (8, 8, X, ("x",), ()),
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
def sharded_cases(draw) -> tuple[Case, Layout, str]:
    mesh = draw(
        st.sampled_from(
            [X, XY, (("x", 2), ("y", 4)), (("x", 2), ("y", 2), ("z", 2)), (("x", 3),)]
        )
    )
    axes = draw(st.permutations([name for name, _ in mesh]))
    ends = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=4, max_size=4)))
    num_batch = draw(st.sampled_from([1, 1, 2]))
    batch = (tuple(axes[: ends[0]]), tuple(axes[ends[0] : ends[1]]))[:num_batch]
    heads = tuple(axes[ends[1] : ends[2]])
    transform = draw(st.sampled_from(["", "remat", "vmap", "vmap"]))
    lead = tuple(axes[ends[2] : ends[3]]) if transform == "vmap" else ()
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
        lead=lead,
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
    return case, layout, transform


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
        case, layout, transform = drawn
        _check(case, layout, transform=transform)

    return test


for _part in range(4):
    globals()[f"test_random_layouts_{_part}"] = _sweep(8, _part)
for _part in range(10):
    globals()[f"test_many_random_layouts_{_part}"] = pytest.mark.long(
        _sweep(40, 100 + _part)
    )


# ------------------------------------------------------------- transforms of one call

SIZES = dict(batch=4, length=6, heads=4, kv_heads=2, head_dim=8)


def _attend(q, k, v, slopes, implementation="ffi"):
    """A mod that closes over an array, and counts heads and batch elements."""

    def mod(s, b, h, q_idx, kv_idx):
        return jnp.tanh(s) + slopes[h] * (kv_idx + 0.5 * h) + 0.1 * b

    return fkl_jax.attention(
        q, k, v, causal=True, score_mod=mod, implementation=implementation
    )


def _arguments(**changes):
    z = {**SIZES, **changes}
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    lead = (z["batch"], z["length"])
    return (
        normal(*lead, z["heads"], z["head_dim"]),
        normal(*lead, z["kv_heads"], z["head_dim"]),
        normal(*lead, z["kv_heads"], z["head_dim"]),
        normal(z["heads"]),
    )


def _mesh(*sizes, kind=AxisType.Auto):
    names = ("x", "y", "z")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def _put(mesh, arrays, specs):
    return tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    )


QKV = P("x", None, "y")
SPECS = (QKV, QKV, QKV, P("y"))
QKV_ONE = P(None, None, "y")  # the same on all of "x"


def _gradient(f):
    """Of a weighted sum of the result, so that the cotangent has no sharding of its
    own."""

    def loss(args):
        out = f(*args)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("spec", [P(), P(None, None, "x"), P("y"), P(None, "y", "x")])
def test_backward_follows_the_query_not_the_cotangent(spec):
    args, mesh = _arguments(), _mesh(4, 2)
    cotangent = jnp.sin(1.0 + jnp.arange(args[0].size).reshape(args[0].shape))

    def pullback(args, cotangent):
        return jax.vjp(_attend, *args)[1](cotangent)

    operands = _put(mesh, args, SPECS), _put(mesh, [cotangent], [spec])[0]
    compiled = compile_step(pullback, *operands)
    got = compiled(*operands)
    assert_close(got, jax.jit(pullback)(args, cotangent))
    for x, want in zip(got, SPECS, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, want), x.ndim)
    assert "all-gather" not in collectives(compiled)


def test_closing_over_an_array_sharded_by_explicit_axes():
    args, mesh = _arguments(), _mesh(4, 2, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        operands = _put(mesh, args, SPECS)
        if sharded_arrays_can_be_indexed():
            got = jax.jit(_attend)(*operands)
            assert_close(jax.device_get(got), jax.jit(_attend)(*args))
        else:
            with pytest.raises(Exception) as raised:
                jax.jit(_attend)(*operands)
            assert "pass the array as a parameter" in raised.value.__notes__[0]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", ["ffi", "xla"])
def test_shard_map(implementation, check_vma):
    """Gradients of what is the same on several devices are summed once."""
    args, mesh = _arguments(), _mesh(2, 2)
    specs = (QKV, QKV, QKV, P())

    def local(q, k, v, slopes):
        # Indices count what is here.
        first = jax.lax.axis_index("y") * q.shape[2]
        b = jax.lax.axis_index("x") * q.shape[0]
        here = jax.lax.dynamic_slice_in_dim(slopes, first, q.shape[2])

        def mod(s, b_, h, q_idx, kv_idx):
            shift = here[h] * (kv_idx + 0.5 * (h + first)) + 0.1 * (b_ + b)
            return jnp.tanh(s) + shift + jax.nn.relu(0 * s * slopes[0])

        return fkl_jax.attention(
            q, k, v, causal=True, score_mod=mod, implementation=implementation
        )

    def mapped(*args):
        return jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=QKV, check_vma=check_vma
        )(*args)

    got = jax.jit(_gradient(mapped))(args)
    assert_close(got, _gradient(_attend)(args))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", ["vmap of grad", "grad of grad", "remat"])
def test_shard_map_and_other_transforms(order, check_vma):
    args, mesh = _arguments(), _mesh(4, 2)

    def attend(q, k, v, slopes):
        return fkl_jax.attention(
            q, k, v, causal=True, score_mod=fkl_jax.SoftCap(2.0 + slopes[0] ** 2),
            implementation="ffi",
        )  # fmt: skip

    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(QKV, QKV, QKV, P()), out_specs=QKV,
        check_vma=check_vma,
    )  # fmt: skip

    def transformed(f):
        if order == "vmap of grad":
            several = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x]), args)
            return jax.jit(jax.vmap(_gradient(f)))(several)
        if order == "remat":
            return jax.jit(_gradient(jax.checkpoint(f)))(args)
        norm = lambda x: sum(jnp.sum(g**2) for g in _gradient(f)(x)[1])  # noqa: E731
        return jax.jit(jax.grad(norm))(args)

    assert_close(transformed(mapped), transformed(attend), tolerance=2e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_some_axes(check_vma, kind):
    """XLA cannot divide the call along the others there, but it must not end."""
    args, mesh = _arguments(), _mesh(4, 2, kind=kind)

    def attend(q, k, v, slopes):
        return fkl_jax.attention(
            q, k, v, causal=True, score_mod=fkl_jax.ALiBi(slopes), implementation="ffi"
        )

    weights = jnp.cos(jnp.arange(args[0].size).reshape(args[0].shape))
    with jax.set_mesh(mesh):
        operands = _put(mesh, args, SPECS)
        mapped = jax.shard_map(
            attend, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"),
            axis_names={"x"}, check_vma=check_vma,
        )  # fmt: skip
        got = jax.jit(jax.grad(lambda a: jnp.sum(mapped(*a) * weights)))(operands)
    want = jax.grad(lambda a: jnp.sum(attend(*a) * weights))(args)
    assert_close(jax.device_get(got), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_vmap_over_a_sharded_axis(kind):
    args, mesh = _arguments(), _mesh(4, 2, kind=kind)
    several = jax.tree.map(lambda x: jnp.stack([x, -x, 2 * x, x + 1]), args)
    specs = (P("x", None, None, "y"), QKV_ONE, QKV_ONE, P("x"))
    operands = (several[0], args[1], args[2], several[3])

    def attend(q, k, v, slopes):
        return fkl_jax.attention(
            q, k, v, causal=True, score_mod=fkl_jax.ALiBi(slopes), implementation="ffi"
        )

    mapped = jax.vmap(attend, (0, None, None, 0))
    weights = jnp.cos(jnp.arange(several[0].size).reshape(several[0].shape))

    def gradient(*operands):
        return jax.grad(lambda a: jnp.sum(mapped(*a) * weights))(operands)

    with jax.set_mesh(mesh):
        placed = _put(mesh, operands, specs)
        compiled = jax.jit(gradient).lower(*placed).compile(COMPILE_FAST)
        got = compiled(*placed)
    assert_close(jax.device_get(got), jax.jit(gradient)(*operands))
    # Slopes are summed over heads on "y", shared keys and values over "x".
    assert set(collectives(compiled)) == {"all-reduce"}


def test_vmap_with_spmd_axis_name():
    args, mesh = _arguments(), _mesh(4, 2)
    several = jnp.stack([args[0], -args[0], 2 * args[0], args[0] + 1])

    def attend(q, k, v, slopes):
        q = jax.lax.with_sharding_constraint(q, NamedSharding(mesh, QKV_ONE))
        return _attend(q, k, v, slopes)

    mapped = jax.vmap(attend, (0, None, None, None), spmd_axis_name="x")
    operands = _put(
        mesh,
        (several, *args[1:]),
        (P("x", None, None, "y"), QKV_ONE, QKV_ONE, P("y")),
    )
    compiled = compile_step(mapped, *operands)
    assert collectives(compiled) == []
    want = jax.vmap(_attend, (0, None, None, None))(several, *args[1:])
    assert_close(compiled(*operands), want)


def test_pmap():
    args = _arguments()
    several = jax.tree.map(lambda x: jnp.stack([x, -x]), args)
    got = jax.pmap(_gradient(_attend))(several)
    assert_close(got, jax.vmap(_gradient(_attend))(several))


def test_second_order_scan_and_eager():
    args, mesh = _arguments(), _mesh(4, 2)
    operands = _put(mesh, args, SPECS)

    def norm(args):
        return sum(jnp.sum(g**2) for g in _gradient(_attend)(args)[1])

    second = jax.jit(jax.grad(norm))
    assert_close(second(operands), second(args), tolerance=2e-4)

    def scanned(q, k, v, slopes):
        def layer(x, scale):
            return x + _attend(x, k, v, slopes * scale), None

        return jax.lax.scan(layer, q, jnp.asarray([0.5, 1.0, -1.0]))[0]

    compiled = compile_step(_gradient(scanned), operands)
    assert_close(compiled(operands), _gradient(scanned)(args))
    assert set(collectives(compiled)) == {"all-reduce"}
    assert_close(_gradient(_attend)(operands), _gradient(_attend)(args))


def test_remat_by_name_runs_the_forward_once():
    args, mesh = _arguments(), _mesh(4, 2)
    policy = jax.checkpoint_policies.save_only_these_names("fkl_out", "fkl_lse")
    gradient = _gradient(jax.checkpoint(_attend, policy=policy))
    compiled = compile_step(gradient, _put(mesh, args, SPECS))
    text = compiled.as_text()
    assert text.count('custom_call_target="fkl_attention_fwd"') == 1
    assert text.count('custom_call_target="fkl_attention_bwd"') == 1


@pytest.mark.parametrize("heads,kv_heads", [(8, 2), (4, 4)])
def test_weights_divided_further_than_heads(heads, kv_heads):
    """A reshape to heads divides head dims too: XLA cuts a mesh axis in two."""
    mesh, width, head_dim = _mesh(8), 16, 8
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 6, width)), jnp.float32) / 4
    wq, wk, wv, wo = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) / 4
        for shape in [
            (width, heads * head_dim),
            (width, kv_heads * head_dim),
            (width, kv_heads * head_dim),
            (heads * head_dim, width),
        ]
    )

    def layer(x, wq, wk, wv, wo):
        q, k, v = ((x @ w).reshape(2, 6, -1, head_dim) for w in (wq, wk, wv))
        out = fkl_jax.attention(q, k, v, causal=True, implementation="ffi")
        return out.reshape(2, 6, -1) @ wo

    args, columns = (x, wq, wk, wv, wo), P(None, "x")
    operands = _put(mesh, args, (P(), columns, columns, columns, P("x")))
    got = jax.jit(_gradient(layer))(operands)
    assert_close(got, _gradient(layer)(args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_divided_lengths_are_gathered(kind):
    args, mesh = _arguments(length=8), _mesh(4, 2, kind=kind)
    specs = (P(None, "x"), P(None, "y"), P("x", "y"), P())
    with jax.set_mesh(mesh):
        operands = _put(mesh, args[:3], specs[:3])
        out = jax.jit(lambda *a: _attend(*a, jnp.ones(4)))(*operands)
    assert_close(jax.device_get(out), _attend(*args[:3], jnp.ones(4)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_plain_jax(kind):
    """XLA divides it as it can."""
    case = _case(num_q_heads=4, num_kv_heads=2)
    explicit = kind == AxisType.Explicit
    layout = Layout(kv_heads=("y",), parameters=True, explicit=explicit)
    _check(case, layout, implementation="xla")


def _spec_of_call(f, *args):
    """The spec of the forward call in a function."""

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "fkl_attention_fwd":
                yield eqn.params["spec"]
            for inner in eqn.params.values():
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from find(inner)

    return next(find(jax.make_jaxpr(f)(*args).jaxpr))


def test_parts_of_captures_in_plain_jax():
    """What a device without kernels for a call does with its part of it."""
    q, k, v, slopes = _arguments()
    gate = jnp.cos(jnp.arange(16.0)).reshape(4, 4)
    keep = jnp.arange(4 * 6).reshape(4, 6) % 5 > 0

    def attend(q, k, v, slopes, gate, keep):
        def score(s, b, h, q_idx, kv_idx):
            return jnp.tanh(s) * (1 + h % 2) + slopes[h] * kv_idx + gate[b, h]

        def mask(b, h, q_idx, kv_idx):
            return keep[b, kv_idx]

        return fkl_jax.attention_with_lse(q, k, v, score_mod=score, mask_mod=mask)

    args = (q, k, v, slopes, gate, keep)
    spec = _spec_of_call(attend, *args)
    named = dict(zip(("query", "key", "value"), args, strict=False))
    want, want_lse = attend(*args)
    indexed = _local_spec.indexed(spec)
    by_shape = {(4,): slopes, (4, 4): gate, (4, 6): keep}
    assert sorted(map(sorted, (x.values() for x in indexed.values()))) == [
        ["b"], ["b", "h"], ["h"],
    ]  # fmt: skip
    # Heads 2 and 3 of batch elements 1 to 3.
    b, h = slice(1, 4), slice(2, 4)
    sizes = {"b": 3, "h": 2}
    slices = tuple(
        (capture, tuple((axis, (name, sizes[name])) for axis, name in axes.items()))
        for capture, axes in indexed.items()
    )
    local = _local_spec.sliced(spec, slices)
    named |= {"query": q[b, :, h], "key": k[b, :, 1:2], "value": v[b, :, 1:2]}
    named |= {"scale": jnp.float32(8**-0.5)}
    named |= {"batch_index": jnp.arange(1, 4), "head_index": jnp.arange(2, 4)}
    for capture, axes in indexed.items():
        reads = next(
            node.data[1]
            for mod in (spec.score, spec.mask)
            for node in mod.program.nodes
            if node.op == "load" and node.data[0] == capture
        )
        part = [{"b": b, "h": h}.get(axes.get(axis), slice(None)) for axis in (0, 1)]
        named[f"capture.{capture}"] = by_shape[tuple(reads)][tuple(part[: len(reads)])]
    bases = _local_spec.bases(spec, slices)
    named |= {bases["b"]: jnp.int32(1), bases["h"]: jnp.int32(2)}
    operands = [named[role] for role in local.operands]
    out, lse = _reference.forward(local, operands)
    assert_close((out, lse), (want[b, :, h], want_lse[b, h]))
    dout, dlse = jnp.sin(out), jnp.cos(lse)
    results = tuple(r for r in local.operands if r in ("query", "key", "capture.0"))
    plain = _reference.backward(local, operands, out, lse, dout, dlse, results)
    kernels = _primitives.backward(local, [*operands, out, lse, dout, dlse], results)
    assert_close(list(plain), list(kernels))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("by", ["jit", "shard_map"])
def test_a_mesh_of_one_gpu_changes_nothing(by, kind):
    args = _arguments(length=64, head_dim=32)
    device = jax.config.jax_default_device
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(kind,) * 2, devices=[device])
    attend = _attend
    if by == "shard_map":
        attend = jax.shard_map(_attend, mesh=mesh, in_specs=SPECS, out_specs=QKV)

    def pullback(attend, args):
        return jax.vjp(attend, *args)[1](args[0])

    plain = jax.jit(lambda a: pullback(_attend, a)).lower(args).compile()
    with jax.set_mesh(mesh):
        operands = _put(mesh, args, SPECS)
        divided = jax.jit(lambda a: pullback(attend, a)).lower(operands).compile()
        got = divided(operands)
    texts = [compiled.as_text() for compiled in (plain, divided)]
    counts = [
        [text.count(f'custom_call_target="{word}"') for text in texts]
        for word in ("fkl_attention_fwd", "fkl_attention_bwd")
    ]
    assert counts == [[1, 1], [1, 1]] and collectives(divided) == []
    # Slopes are summed by atomics.
    assert_close(jax.device_get(got), jax.device_get(plain(args)), tolerance=1e-4)


# ----------------------------------------------------------------- compilation cache

_CACHED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
hits = []
jax.monitoring.register_event_listener(
    lambda e, **_: hits.append(e) if e == "/jax/compilation_cache/cache_hits" else None
)
import fkl_jax
q = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 2, 8)), jnp.float32)
mods = [lambda s, b, h, q_idx, kv_idx: 0.5 * s, lambda s, b, h, q_idx, kv_idx: -s]
for mod in mods:
    f = lambda q: fkl_jax.attention(q, q, q, score_mod=mod, implementation="ffi")
    mesh = jax.make_mesh((4,), ("x",))
    sharded = jax.device_put(q, NamedSharding(mesh, P("x")))
    # Other programs are compiled as well; only the sharded call counts.
    before = len(hits)
    got = jax.jit(f)(sharded)
    print("hit" if len(hits) > before else "miss")
    want = fkl_jax.attention(q, q, q, score_mod=mod, implementation="xla")
    np.testing.assert_allclose(got, want, atol=1e-5)
"""


def test_persistent_cache_hits_and_confuses_nothing(tmp_path):
    def run():
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _CACHED, str(tmp_path)],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.split()

    assert run() == ["miss", "miss"]
    assert run() == ["hit", "hit"]
