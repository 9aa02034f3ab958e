"""`fkl_jax.dot_product_attention` in the place of `jax.nn.dot_product_attention`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax

B, T, S, N, K, H = 2, 7, 10, 4, 2, 8


def _random(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _mask(*shape):
    """Return a mask that leaves each row a live key, the first one."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 0] = True
    return jnp.asarray(mask)


CASES = {
    "plain": {},
    "scale": {"scale": 0.7},
    "scale_0": {"scale": 0.0},
    "causal": {"is_causal": True},
    "bias": {"bias": _random(B, N, T, S, seed=5)},
    "bias_1": {"bias": _random(1, N, 1, S, seed=5)},
    "bias_one_head": {"bias": _random(B, 1, T, S, seed=5)},
    "mask": {"mask": _mask(B, N, T, S)},
    "mask_broadcast": {"mask": _mask(1, 1, T, S)},
    "mask_batch": {"mask": _mask(B, 1, 1, S)},
    "bias_mask_causal": {
        "bias": _random(1, N, T, S, seed=5), "mask": _mask(B, 1, T, S),
        "is_causal": True,
    },
    "query_seq_lengths": {"query_seq_lengths": jnp.asarray([3, 7])},
    "key_value_seq_lengths": {"key_value_seq_lengths": jnp.asarray([4, 10])},
    "both_lengths": {
        "query_seq_lengths": jnp.asarray([7, 2]),
        "key_value_seq_lengths": jnp.asarray([1, 6]),
    },
    "window": {"local_window_size": 2},
    "window_pair": {"local_window_size": (3, 1)},
    "window_causal": {"local_window_size": (2, 2), "is_causal": True},
    "everything": {
        "bias": _random(B, N, T, S, seed=5), "mask": _mask(1, 1, T, S),
        "is_causal": True, "scale": 0.3, "local_window_size": (7, 7),
        "key_value_seq_lengths": jnp.asarray([4, 10]),
    },
}  # fmt: skip


def _call(function, qkv, kwargs, backend):
    kwargs = dict(kwargs)
    args = [kwargs.pop(name, None) for name in ("bias", "mask")]
    return function(*qkv, *args, **kwargs, implementation=backend)


def test_signature_is_that_of_jax():
    theirs = inspect.signature(jax.nn.dot_product_attention)
    ours = inspect.signature(fkl_jax.dot_product_attention)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].kind == parameter.kind, name
        assert ours.parameters[name].default == parameter.default, name


@pytest.mark.parametrize("name", CASES)
def test_same_as_jax(name, backend):
    kwargs = CASES[name]
    qkv = _random(B, T, N, H), _random(B, S, K, H, seed=1), _random(B, S, K, H, seed=2)
    weight = _random(B, T, N, H, seed=3)
    lengths = kwargs.get("query_seq_lengths", jnp.full((B,), T))
    # A row beyond its length is zero here and in JAX's cuDNN path; the plain path of
    # JAX gives the mean of the values.
    rows = (jnp.arange(T) < lengths[:, None])[..., None, None]
    differentiable = {k: kwargs[k] for k in ("bias",) if k in kwargs}

    def run(function, backend):
        def f(qkv, differentiable):
            out = _call(function, qkv, {**kwargs, **differentiable}, backend)
            return jnp.sum(jnp.where(rows, out * weight, 0)), out

        (_, out), grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(
            qkv, differentiable
        )
        return jnp.where(rows, out, 0), grads

    got = run(fkl_jax.dot_product_attention, backend)
    want = run(jax.nn.dot_product_attention, "xla")
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype, backend):
    qkv = (
        _random(B, T, N, H, dtype=dtype),
        _random(B, S, K, H, seed=1, dtype=dtype),
        _random(B, S, K, H, seed=2, dtype=dtype),
    )
    got = _call(fkl_jax.dot_product_attention, qkv, {"is_causal": True}, backend)
    want = _call(jax.nn.dot_product_attention, qkv, {"is_causal": True}, "xla")
    assert got.dtype == want.dtype == dtype
    exact = _call(
        jax.nn.dot_product_attention,
        tuple(x.astype(jnp.float32) for x in qkv), {"is_causal": True}, "xla",
    )  # fmt: skip
    error = np.abs(np.asarray(got, np.float32) - exact).max()
    theirs = np.abs(np.asarray(want, np.float32) - exact).max()
    # Half an ulp of the largest output is the least that rounding it costs.
    floor = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact).max()
    assert error <= 2 * theirs + floor


def test_three_dimensional_operands(backend):
    """Without a batch axis, as JAX takes them: (T, N, H)."""
    qkv = _random(T, N, H), _random(S, K, H, seed=1), _random(S, K, H, seed=2)
    got = _call(fkl_jax.dot_product_attention, qkv, {"is_causal": True}, backend)
    want = _call(jax.nn.dot_product_attention, qkv, {"is_causal": True}, "xla")
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_return_residual(backend):
    """The residual is the LSE in JAX's layout, (B, T, N)."""
    qkv = _random(B, T, N, H), _random(B, S, K, H, seed=1), _random(B, S, K, H, seed=2)
    kwargs = {"return_residual": True, "scale": 0.4}
    got = _call(fkl_jax.dot_product_attention, qkv, kwargs, backend)
    want = _call(jax.nn.dot_product_attention, qkv, kwargs, "xla")
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rows_without_a_key_are_zero(backend):
    """The difference on purpose: jax.nn gives such a row the mean of the values."""
    qkv = _random(B, T, N, H), _random(B, S, K, H, seed=1), _random(B, S, K, H, seed=2)
    mask = jnp.asarray(np.arange(T) % 2 == 0)[None, None, :, None]
    out = _call(fkl_jax.dot_product_attention, qkv, {"mask": mask}, backend)
    assert not np.asarray(out[:, 1::2]).any()
    assert np.asarray(out[:, ::2]).any()


@pytest.mark.parametrize(
    "kwargs,kind,words",
    [
        ({"mask": jnp.ones((1, 1, T, S))}, (TypeError, ValueError), "mask"),
        ({"mask": _mask(1, 1, T, S + 1)}, ValueError, "mask.*11"),
        ({"local_window_size": -1}, ValueError, "-1"),
        ({"query_seq_lengths": jnp.zeros(B)}, TypeError, "query_seq_lengths|q_seq_l"),
    ],
    ids=["mask_dtype", "mask_shape", "window", "lengths"],
)
def test_errors(kwargs, kind, words, backend):
    qkv = _random(B, T, N, H), _random(B, S, K, H, seed=1), _random(B, S, K, H, seed=2)
    with pytest.raises(kind, match=words):
        _call(fkl_jax.dot_product_attention, qkv, kwargs, backend)


@pytest.mark.parametrize("implementation", ["cudnn", "flash"])
def test_unknown_implementation(implementation):
    """JAX's own "cudnn" is not one of ours; saying so beats running something else."""
    q = _random(B, T, N, H)
    with pytest.raises((ValueError, NotImplementedError), match=implementation):
        fkl_jax.dot_product_attention(q, q, q, implementation=implementation)
