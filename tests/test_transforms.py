"""grad, scan, remat, disable_jit, x64, debug_nans, second order, other platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, arguments, call, check, make_problem, run_backend
from jax.test_util import check_grads

import fkl_jax

FULL = Case(
    q_seq_len=7,
    kv_seq_len=11,
    head_dim=8,
    value_head_dim=8,
    causal="bottom_right",
    bias="NTS",
    score_mods=("alibi", "soft_cap"),
    mask_mods=("window",),
    sinks=True,
    scale=0.4,
    traced_scale=True,
    lengths="qk",
    seed=2,
)


def _loss(problem, implementation):
    """Return a scalar function of the float operands, with out and LSE in it."""
    others = jax.tree.map(jnp.asarray, problem.others)
    weight = jnp.asarray(problem.cotangents[0])

    def loss(floats):
        out, lse = call(problem.case, implementation, floats, others)
        lse = jnp.where(jnp.isfinite(lse), lse, 0)
        return jnp.sum(jnp.sin(out) * weight) + jnp.sum(lse**2)

    return loss, jax.tree.map(jnp.asarray, problem.floats)


def count_primitive(jaxpr, name: str) -> int:
    """Count the equations of a jaxpr, inner jaxprs included, with primitive `name`."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == name
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                count += count_primitive(inner, name)
    return count


# -------------------------------------------------------------------- jit and its kin


def test_disable_jit(backend):
    problem = make_problem(FULL)
    loss, floats = _loss(problem, backend)
    want = jax.jit(jax.value_and_grad(loss))(floats)
    with jax.disable_jit():
        got = jax.value_and_grad(loss)(floats)
    _assert_close(got, want)


def test_without_jit(backend):
    loss, floats = _loss(make_problem(FULL), backend)
    _assert_close(
        jax.value_and_grad(loss)(floats), jax.jit(jax.value_and_grad(loss))(floats)
    )


def test_x64_changes_nothing_for_float32(backend):
    problem = make_problem(FULL)
    want = run_backend(problem, backend)
    with jax.enable_x64(True):
        got = run_backend(problem, backend)
    check(problem, got)
    _assert_close(got, want)


@pytest.mark.parametrize("masks", [("kill_rows",), ("nothing",)])
def test_debug_nans(masks, backend):
    """-inf of dead rows and what is done with it is not a NaN on the way."""
    case = Case(mask_mods=masks, lengths="qk", score_mods=("soft_cap",))
    loss, floats = _loss(make_problem(case), backend)
    with jax.debug_nans(True):
        value, grads = jax.jit(jax.value_and_grad(loss))(floats)
        jax.block_until_ready(jax.value_and_grad(loss)(floats))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, grads)))


def test_strict_promotion(backend):
    """Nothing of ours leans on implicit promotion of dtypes or ranks."""
    case = Case(
        bias="NTS", dtype="bfloat16", lengths="qk", offsets="batch", sinks=True,
        score_mods=("alibi", "soft_cap", "relative_bias"), scale=0.5, traced_scale=True,
        mask_mods=("window", "prefix_lm_per_batch", "padding", "segment_ids"),
        mask_as_score=("dense_4d",),
        block_mask="holes", segment_ids=True,
    )  # fmt: skip
    problem = make_problem(case)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.check_tracer_leaks(True),
    ):
        got = run_backend(problem, backend)
    check(problem, got)


def test_scan_over_layers(backend):
    """One program in a scan body, with a mod parameter per layer, forward and back."""
    layers = 3
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 6, 4, 8)), jnp.float32)
    caps = jnp.asarray([1.0, 2.0, 3.0])
    windows = jnp.asarray([1, 3, 100])

    def layer(x, cap, window):
        return x + fkl_jax.attention(
            x, x, x, causal=True, score_mod=fkl_jax.SoftCap(cap),
            mask_mod=fkl_jax.SlidingWindow(window), implementation=backend,
        )  # fmt: skip

    def scanned(x, caps):
        x, _ = jax.lax.scan(lambda x, p: (layer(x, *p), None), x, (caps, windows))
        return jnp.sum(x**2)

    def unrolled(x, caps):
        for n in range(layers):
            x = layer(x, caps[n], windows[n])
        return jnp.sum(x**2)

    got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, caps)
    _assert_close(got, jax.jit(jax.value_and_grad(unrolled, (0, 1)))(x, caps))


def test_cond_and_while(backend):
    q = k = v = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    attend = functools.partial(fkl_jax.attention, implementation=backend)

    @jax.jit
    def f(flag, q):
        q = jax.lax.cond(
            flag, lambda q: attend(q, k, v, causal=True), jnp.zeros_like, q
        )
        return jax.lax.fori_loop(0, 2, lambda _, q: attend(q, k, v), q)

    want = attend(attend(attend(q, k, v, causal=True), k, v), k, v)
    _assert_close(f(True, q), want)


# ----------------------------------------------------------------------------- remat


def _blocks(policy, backend, blocks=2):
    def block(x, cap):
        out = fkl_jax.attention(
            jnp.sin(x), x, x, causal=True, score_mod=fkl_jax.SoftCap(cap),
            implementation=backend,
        )  # fmt: skip
        return x + out

    def loss(x, cap):
        for _ in range(blocks):
            x = jax.checkpoint(block, policy=policy)(x, cap)
        return jnp.sum(x**2)

    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    return loss, x, jnp.float32(2.0)


@pytest.mark.parametrize(
    "names,forwards",
    [(("fkl_out", "fkl_lse"), 2), (("fkl_out",), 4), (("fkl_lse",), 4), ((), 4)],
    ids=lambda x: str(x),
)
def test_remat_by_name_does_not_rerun_the_forward(names, forwards):
    """Two blocks: two forward kernels if both results are saved, else two more."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    loss, x, cap = _blocks(policy, "ffi")
    # Dead code elimination is what drops a forward that only its residuals needed.
    jaxpr = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, cap).jaxpr.jaxpr
    assert count_primitive(jaxpr, "fkl_attention_fwd") == forwards
    assert count_primitive(jaxpr, "fkl_attention_bwd") == 2


@pytest.mark.parametrize("names", [("fkl_out", "fkl_lse"), ("fkl_out",), ()])
def test_remat_gives_the_same_gradients(names, backend):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    loss, x, cap = _blocks(policy, backend)
    plain, *_ = _blocks(jax.checkpoint_policies.everything_saveable, backend)
    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, cap)
    _assert_close(got, jax.jit(jax.value_and_grad(plain, (0, 1)))(x, cap))


@pytest.mark.gpu
def test_remat_runs_the_forward_kernel_once_on_a_gpu():
    policy = jax.checkpoint_policies.save_only_these_names("fkl_out", "fkl_lse")
    loss, x, cap = _blocks(policy, "ffi")
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, cap).compile().as_text()
    for word in ("fkl_attention_fwd", "fkl_attention_bwd"):
        assert text.count(f'custom_call_target="{word}"') == 2  # one a block


@pytest.mark.gpu
def test_command_buffers_replay_with_new_values():
    """XLA records kernels into a graph and updates it as buffers move."""
    loss, *_ = _blocks(jax.checkpoint_policies.everything_saveable, "ffi", blocks=6)
    f = jax.jit(jax.value_and_grad(loss, (0, 1)))
    x = jax.random.normal(jax.random.key(0), (1, 80, 2, 64), jnp.bfloat16)
    options = {"xla_gpu_graph_min_graph_size": 1}
    replayed = f.lower(x, jnp.float32(1)).compile(compiler_options=options)
    options = {"xla_gpu_graph_min_graph_size": 1_000_000}
    launched = f.lower(x, jnp.float32(1)).compile(compiler_options=options)
    kept = []  # so that each call gets other buffers
    for n in range(5):
        args = (x * (n + 1), jnp.float32(n + 1))
        kept.append(replayed(*args))
        # Slopes of the mod are summed by atomics.
        _assert_close(kept[-1], launched(*args), tolerance=2e-2)


def test_names_are_in_the_jaxpr():
    q = jnp.zeros((1, 4, 2, 8))

    def loss(q):
        return fkl_jax.attention(q, q, q, implementation="ffi").sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(q))
    assert "fkl_out" in text and "fkl_lse" in text


# ------------------------------------------------------------- forward and second order


def test_second_order_of_pure_jax_against_finite_differences():
    """float64: the gradient of the gradient, by central differences of the gradient."""
    case = Case(
        batch=(1,), q_seq_len=4, kv_seq_len=5, num_q_heads=2, num_kv_heads=1,
        head_dim=3, value_head_dim=2, dtype="float64", sinks=True,
        score_mods=("alibi", "soft_cap"), mask_mods=("window",), bias="TS",
        lengths="k", seed=4,
    )  # fmt: skip
    with jax.enable_x64(True):
        loss, floats = _loss(make_problem(case), "xla")
        floats = jax.tree.map(lambda x: x.astype(jnp.float64), floats)
        # sinks and mod parameters may be computed with in float32 on the way
        check_grads(loss, (floats,), order=2, modes=["rev"], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("order", ["reverse_over_reverse", "grad_of_norm"])
def test_second_order_of_backends_agrees(order):
    problem = make_problem(FULL)
    direction = {
        name: jax.random.normal(jax.random.key(n), x.shape)
        for n, (name, x) in enumerate(problem.floats.items())
    }

    def second(implementation):
        loss, floats = _loss(problem, implementation)
        grad = jax.grad(loss)
        if order == "grad_of_norm":
            return jax.jit(
                jax.grad(lambda x: sum(jnp.sum(g**2) for g in grad(x).values()))
            )(floats)
        return jax.jit(
            jax.grad(
                lambda x: sum(jnp.vdot(g, direction[n]) for n, g in grad(x).items())
            )
        )(floats)

    # Two derivatives in float32: looser than one.
    _assert_close(second("ffi"), second("xla"), tolerance=2e-4)


def test_second_order_under_vmap_and_jit():
    q = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))

    def norm(q, implementation):
        def loss(q):
            return jnp.sum(
                fkl_jax.attention(
                    q, q, q, causal=True, implementation=implementation,
                    score_mod=lambda s, b, h, q_idx, kv_idx: jnp.tanh(s),
                )
                ** 2
            )  # fmt: skip

        return jnp.sum(jax.grad(loss)(q) ** 2)

    got = jax.jit(jax.vmap(jax.grad(functools.partial(norm, implementation="ffi"))))(q)
    want = jax.vmap(jax.grad(functools.partial(norm, implementation="xla")))(q)
    _assert_close(got, want, tolerance=2e-4)


def test_forward_mode_of_pure_jax():
    problem = make_problem(FULL)
    loss, floats = _loss(problem, "xla")
    tangents = {
        name: jax.random.normal(jax.random.key(n), x.shape)
        for n, (name, x) in enumerate(floats.items())
    }
    _, got = jax.jvp(loss, (floats,), (tangents,))
    grads = jax.grad(loss)(floats)
    want = sum(jnp.vdot(grads[name], tangents[name]) for name in floats)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_hessian_of_pure_jax():
    """Forward over reverse, as `jax.hessian` does it."""
    q = jax.random.normal(jax.random.key(0), (1, 3, 1, 2))

    def loss(q):
        return jnp.sum(
            fkl_jax.attention(q, q, q, causal=True, implementation="xla") ** 2
        )

    hessian = jax.hessian(loss)(q).reshape(q.size, q.size)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-5)
    want = jax.jacrev(jax.grad(loss))(q).reshape(q.size, q.size)
    np.testing.assert_allclose(hessian, want, rtol=1e-4, atol=1e-5)


def test_linearize_and_vjp_twice(backend):
    """A saved vjp can be called again, with other cotangents."""
    problem = make_problem(FULL)
    floats, others = jax.tree.map(jnp.asarray, (problem.floats, problem.others))
    (out, lse), vjp = jax.vjp(lambda f: call(FULL, backend, f, others), floats)
    one = vjp((jnp.ones_like(out), jnp.zeros_like(lse)))[0]
    two = vjp((2 * jnp.ones_like(out), jnp.zeros_like(lse)))[0]
    _assert_close(two, jax.tree.map(lambda x: 2 * x, one))


def test_gradient_of_one_operand_is_that_of_all(backend):
    """Asking for fewer gradients changes none of them."""
    problem = make_problem(FULL)
    loss, floats = _loss(problem, backend)
    want = jax.jit(jax.grad(loss))(floats)
    for name in floats:
        got = jax.jit(jax.grad(lambda x, name=name: loss({**floats, name: x})))(
            floats[name]
        )
        _assert_close(got, want[name])


# ---------------------------------------------------------------------- other platforms


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_lowering_for_cuda_without_a_gpu(platforms, gradient):
    """The module holds the whole spec: nothing but the module is needed to run it."""
    problem = make_problem(FULL)
    others = jax.tree.map(jnp.asarray, problem.others)
    floats = jax.tree.map(jnp.asarray, problem.floats)

    def f(floats):
        out = fkl_jax.attention(
            floats["query"], floats["key"], floats["value"],
            **arguments(FULL, floats, others),
        )  # fmt: skip
        return jnp.sum(out)

    f = jax.grad(f) if gradient else f
    lowered = jax.jit(f).trace(floats).lower(lowering_platforms=platforms)
    text = lowered.as_text()
    assert "fkl_attention_fwd" in text
    assert ("fkl_attention_bwd" in text) == gradient
    assert "spec = " in text and "tanh" in text  # the soft cap's program
    for attribute in ("abi", "operands", "results", "num_batch_dims", "deterministic"):
        assert f"{attribute} = " in text, attribute
    for role in ("query", "bias", "scale", "kv_seq_lengths", "capture.0"):
        assert role in text, role


def test_platforms_without_kernels_get_pure_jax():
    q = jnp.zeros((1, 4, 2, 8))
    f = jax.jit(lambda q: fkl_jax.attention(q, q, q, causal=True))
    text = f.trace(q).lower(lowering_platforms=("tpu",)).as_text()
    assert "fkl_attention_fwd" not in text and "custom_call" not in text


def _assert_close(got, want, tolerance=1e-5):
    """The two differ by the order of sums only."""

    def one(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        size = np.max(np.abs(b), initial=1.0, where=np.isfinite(b))
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * size,
            err_msg=jax.tree_util.keystr(path),
        )  # fmt: skip

    jax.tree_util.tree_map_with_path(one, got, want)


def _scaled_by_head(backend):
    q, k = (jax.random.normal(jax.random.key(i), (1, 7, 4, 8)) for i in range(2))

    def loss(q, w):
        out = fkl_jax.attention(
            q, k, k, implementation=backend,
            score_mod=lambda s, b, h, i, j: s * w[h] + w[b],
        )  # fmt: skip
        return jnp.sum(jnp.sin(out))

    return loss, q, jnp.arange(1.0, 5.0)


def test_every_differentiation_gets_the_gradients_that_it_asks_for(backend):
    """Of one call, one after the other: both, one, both in another transformation."""
    loss, q, w = _scaled_by_head(backend)
    both = jax.grad(loss, (0, 1))
    want = both(q, w)
    jax.grad(loss, 1)(q, w)
    _assert_close(both(q, w), want)
    _assert_close(jax.jit(both)(q, w), want)
    mapped = jax.vmap(both, (0, None))(q[None], w)
    _assert_close(jax.tree.map(lambda x: x[0], mapped), want)
    _assert_close(jax.jit(jax.grad(loss, 0))(q, w), want[0])


def test_hessian(backend):
    """A score that is linear in the parameter: its derivative depends on nothing."""
    loss, q, w = _scaled_by_head(backend)
    got = jax.hessian(loss, 1)(q, w)
    _assert_close(got, jax.jacrev(jax.grad(loss, 1), 1)(q, w))
