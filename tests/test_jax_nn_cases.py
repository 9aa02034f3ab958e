"""The situations in which JAX tests its own `dot_product_attention`, through ours.

Which they are was read off its public tests and documentation: element types with
grouped heads, with and without vmap; bias, causal, padding, custom mask, windows and
their combinations; gradients of the bias, with a mask of three axes; large heads; the
residual; operands sharded over batch and heads. Each result is compared with the
formula in float64, and may err twice as much as that of `jax.nn`.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import in_float64, normal

import fkl_jax

B, L, N, H = 2, 24, 4, 8

# Plain JAX has the same function in front of it: test_dot_product_attention.py.
pytestmark = pytest.mark.backends("ffi", "cuda")


def _qkv(batch=(B,), kv_heads=N, head_dim=H):
    return (
        normal(*batch, L, N, head_dim),
        normal(*batch, L, kv_heads, head_dim, seed=1),
        normal(*batch, L, kv_heads, head_dim, seed=2),
    )


def _formula(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
    return_residual=False,
):  # fmt: skip
    """`dot_product_attention` for equal lengths, as one writes it down."""
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    scores = jnp.einsum("...ihd,...jhd->...hij", query, key)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if bias is not None:
        scores += bias
    i, j = jnp.arange(L)[:, None], jnp.arange(L)[None, :]
    live = jnp.ones((L, L), bool) if mask is None else mask
    if is_causal:
        live &= j <= i
    if local_window_size is not None:
        left, right = local_window_size
        live &= (i - left <= j) & (j <= i + right)
    if key_value_seq_lengths is not None:
        live &= j < key_value_seq_lengths[:, None, None, None]
    scores = jnp.where(live, scores, -jnp.inf)
    out = jnp.einsum("...hij,...jhd->...ihd", jax.nn.softmax(scores), value)
    lse = jax.lax.stop_gradient(jax.nn.logsumexp(scores, axis=-1))
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


def _check(floats, others, static, dtype, backend, in_axes=None):
    """Values and gradients err at most twice as much as those of `jax.nn`.

    Args:
        floats: `query`, `key`, `value` and maybe `bias`, to be differentiated.
        others: `mask` and lengths.
        static: other keywords.
        in_axes: of a vmap over query, key, value, bias and mask.
    """
    shape = floats["query"].shape
    weight = normal(*shape, seed=9)

    def run(function, low, others, weight):
        function = functools.partial(function, **static)
        if in_axes is not None:
            function = jax.vmap(function, in_axes)

        def loss(floats):
            more = dict(others)
            array = [floats[k] for k in ("query", "key", "value")]
            out = function(*array, floats.get("bias"), more.pop("mask", None), **more)
            out, *lse = out if isinstance(out, tuple) else (out,)
            lengths = others.get("query_seq_lengths")
            if lengths is not None:
                # Rows of padding are 0 here; what jax.nn gives depends on its version.
                rows = jnp.arange(L) < lengths[:, None]
                out = jnp.where(rows[..., None, None], out, 0)
            return jnp.sum(out.astype(weight.dtype) * weight), (out, *lse)

        (_, results), grads = jax.value_and_grad(loss, has_aux=True)(low)
        return results, grads

    low = {k: jnp.asarray(x, dtype) for k, x in floats.items()}
    # The 16-bit operands as they are: having rounded them is nobody's error.
    same = {k: np.asarray(x, np.float64) for k, x in low.items()}
    ours = functools.partial(fkl_jax.dot_product_attention, implementation=backend)
    got = jax.jit(functools.partial(run, ours))(low, others, weight)
    theirs = functools.partial(run, jax.nn.dot_product_attention)
    if dtype == "float16":
        # On a CPU jax.nn has no gradient for it: float32, and the results rounded.
        peer = jax.jit(theirs)(jax.tree.map(jnp.float32, low), others, weight)
        peer = jax.tree.map(lambda p, g: p.astype(g.dtype), peer, got)
    else:
        peer = jax.jit(theirs)(low, others, weight)
    exact = in_float64(functools.partial(run, _formula), same, others, weight)
    assert jax.tree.structure(got) == jax.tree.structure(peer)

    def check(got, peer, exact):
        assert got.shape == peer.shape
        error, their_error = (
            np.abs(np.asarray(x, np.float64) - exact).max() for x in (got, peer)
        )
        # Rounding a 16-bit result costs half a unit; float32 sums cost a few.
        units = 8 if got.dtype == jnp.float32 else 1
        floor = units * float(jnp.finfo(got.dtype).eps) * np.abs(exact).max()
        assert error <= 2 * their_error + floor, (error, their_error, floor)

    jax.tree.map(check, got, peer, exact)


def _floats(qkv, **more):
    return dict(zip(("query", "key", "value"), qkv, strict=True), **more)


@pytest.mark.parametrize(
    "dtype,group,use_vmap",
    [
        ("float32", 1, True), ("float32", 4, False),
        ("bfloat16", 1, False), ("bfloat16", 2, True), ("float16", 4, True),
    ],
)  # fmt: skip
def test_grouped_heads(dtype, group, use_vmap, backend):
    in_axes = (0, 0, 0, None, None) if use_vmap else None
    floats = _floats(_qkv(kv_heads=N // group))
    _check(floats, {}, {}, dtype, backend, in_axes)


MODES = {
    "bias": {"bias": normal(1, N, L, L, seed=4)},
    "causal": {"is_causal": True},
    "padding": {
        "query_seq_lengths": np.int32([L // 2, L // 4]),
        "key_value_seq_lengths": np.int32([L // 4, L // 2]),
    },
    "custom": {"mask": np.tri(L, dtype=bool)[None, None]},
    "window": {"local_window_size": (3, 2)},
    "left_window": {"local_window_size": (3, 0)},
    "scale": {"scale": 0.5},
}


@pytest.mark.parametrize(
    "modes",
    [
        "padding", "causal padding", "custom padding", "bias causal", "causal window",
        "bias custom left_window scale",
    ],
)  # fmt: skip
def test_masks(modes, backend):
    floats, others, static = _floats(_qkv()), {}, {}
    for mode in modes.split():
        for name, value in MODES[mode].items():
            arrays = floats if name == "bias" else others
            (arrays if isinstance(value, np.ndarray) else static)[name] = value
    _check(floats, others, static, "bfloat16", backend)


@pytest.mark.parametrize("batch,use_vmap", [(1, False), (5, False), (5, True)])
def test_gradient_of_the_bias(batch, use_vmap, backend):
    """For any batch, where cuDNN gives it for 1 only; the mask has three axes."""
    floats = _floats(_qkv((batch,)), bias=normal(batch, N, L, L, seed=4))
    others = {"mask": np.ones((1, 1, L), bool)}
    in_axes = (0, 0, 0, 0, None) if use_vmap else None
    _check(floats, others, {}, "float32", backend, in_axes)


@pytest.mark.parametrize("axes", ["S", "NS"])
def test_gradient_of_a_broadcast_bias(axes, backend):
    """Always along the keys: a shift of all scores of a row has no gradient."""
    full = {"B": B, "N": N, "T": L, "S": L}
    shape = [full[a] if a in axes else 1 for a in "BNTS"]
    _check(_floats(_qkv(), bias=normal(*shape, seed=4)), {}, {}, "float32", backend)


def test_large_heads(backend):
    floats = _floats(_qkv(head_dim=256))
    _check(floats, {}, {"is_causal": True, "scale": 0.1}, "bfloat16", backend)


@pytest.mark.parametrize("batch", [(B,), ()], ids=["BTNH", "TNH"])
def test_residual(batch, backend):
    _check(_floats(_qkv(batch)), {}, {"return_residual": True}, "float32", backend)


def test_packed_sequences(backend):
    """Several documents in a row: a mask in jax.nn, segment ids here."""
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (B, L)))
    q, k, v = _qkv()
    mask = ids[:, None, :, None] == ids[:, None, None, :]
    want = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(mask))
    got = fkl_jax.dot_product_attention(q, k, v, mask=mask, implementation=backend)
    np.testing.assert_allclose(got, want, atol=2e-6)
    got = fkl_jax.attention(
        q, k, v, q_segment_ids=ids, kv_segment_ids=ids, implementation=backend
    )
    np.testing.assert_allclose(got, want, atol=2e-6)


SHARDED = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import fkl_jax

assert jax.device_count() == 4
B, L, N, K, H = 4, 16, 4, 2, 8
mesh = jax.make_mesh((2, 2), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
keys = iter(jax.random.split(jax.random.key(0), 10))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
normal = lambda *shape: jax.random.normal(next(keys), shape)
heads = ("dp", None, "tp", None)
q, k, v, weight = (put(normal(B, L, n, H), *heads) for n in (N, K, K, N))
mask = put(jax.random.bernoulli(next(keys), 0.5, (B, N, L, L)).at[..., 0].set(True),
           "dp", "tp")
lengths = put(jnp.asarray([3, 16, 9, 1], jnp.int32), "dp")

def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)

def run(function, bias, mask, lengths, q, k, v):
    def loss(q, k, v, bias):
        out = function(
            q, k, v, bias, mask, is_causal=True, key_value_seq_lengths=lengths)
        return jnp.sum(out * weight), out
    return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

for bias, m, n in (
    (put(normal(B, N, L, L), "dp", "tp"), mask, None),
    (put(normal(1, N, L, L), None, "tp"), None, lengths),
):
    got, want = (
        jax.jit(functools.partial(run, f))(bias, m, n, q, k, v)
        for f in (fkl_jax.dot_product_attention, jax.nn.dot_product_attention)
    )
    jax.tree.map(close, got, want)

# A shard of the batch each, with the residual and its cotangent.
stat = put(normal(B, L, N), "dp")
@jax.jit
def residual(q, k, v):
    function = functools.partial(fkl_jax.dot_product_attention, return_residual=True)
    out, pullback = jax.vjp(function, q, k, v)
    return out, pullback((weight, stat))
def reference(q, k, v):
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(H)
    return (jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v),
            jnp.moveaxis(jax.nn.logsumexp(s, axis=-1), 1, 2))
want, pullback = jax.vjp(reference, q, k, v)
jax.tree.map(close, residual(q, k, v), (want, pullback((weight, stat))))
"""


def test_sharded_operands():
    """Batch over one mesh axis, heads over another; in a process with four devices."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    subprocess.run([sys.executable, "-c", SHARDED], check=True, env=environment)
