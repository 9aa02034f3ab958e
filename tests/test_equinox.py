"""`fkl_jax.equinox`: in the place of Equinox's layer, and the layer that it adds."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax

# The `test` extra installs it (test_packaging.py); a machine made by hand may lack it.
pytest.importorskip("equinox")

import equinox as eqx
import layers
from layers import normal

from fkl_jax.equinox import GroupedQueryAttention, MultiheadAttention

# What is tested here is in front of the backends; plain JAX, slow to compile, gets a
# few of these tests.
compiled = pytest.mark.backends("ffi", "cuda")

B, T, S, N, K, D = 2, 7, 10, 4, 2, 32


def _pair(**kwargs):
    """Our layer and Equinox's, with the same parameters."""
    kwargs = {"num_heads": N, "query_size": D, "key": jax.random.key(0), **kwargs}
    return MultiheadAttention(**kwargs), eqx.nn.MultiheadAttention(**kwargs)


def _mask(*shape):
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 0] = True  # Equinox gives rows without a key the mean
    return mask


def _swap_halves(x):
    return jnp.concatenate([x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


SIZES = dict(
    key_size=12, value_size=20, output_size=9, qk_size=6, vo_size=10,
    use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True,
)  # fmt: skip
CASES = {
    "sizes_and_biases": (SIZES, {}),
    "mask": ({}, {"mask": _mask(T, S)}),
    "mask_per_head": (SIZES, {"mask": _mask(N, T, S)}),
    "process_heads": (
        {},
        {"process_heads": lambda q, k, v: (_swap_halves(q), 2 * k, v + 1)},
    ),
}


@compiled
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_equinox(name, backend):
    made, called = CASES[name]
    ours, theirs = _pair(**made)
    inputs = (
        normal(T, D),
        normal(S, made.get("key_size", D), seed=1),
        normal(S, made.get("value_size", D), seed=2),
    )
    weight = normal(T, made.get("output_size", D), seed=3)
    leaves = jax.tree.leaves(eqx.filter(ours, eqx.is_array))

    def run(layer, kwargs, leaves, inputs, weight):
        static = eqx.partition(layer, eqx.is_array)
        tree = jax.tree.structure(static[0])

        def f(leaves, inputs):
            whole = eqx.combine(jax.tree.unflatten(tree, leaves), static[1])
            out = whole(*inputs, **called, **kwargs)
            return jnp.sum(out * weight), out

        (_, out), grads = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(
            leaves, inputs
        )
        return out, grads

    args = (leaves, inputs, weight)
    got = jax.jit(functools.partial(run, ours, {"implementation": backend}))(*args)
    peer = jax.jit(functools.partial(run, theirs, {}))(*args)
    exact = layers.in_float64(functools.partial(run, theirs, {}), *args)
    layers.assert_as_accurate(got, peer, exact)


@compiled
@pytest.mark.parametrize("in_axes", [(0, 0, 0, 0), (0, None, None, None)])
def test_under_the_users_vmap(in_axes, backend):
    ours, theirs = _pair()
    inputs = [
        normal(*([B] if axis == 0 else []), *shape)
        for axis, shape in zip(in_axes, [(T, D), (S, D), (S, D)], strict=False)
    ]
    mask = _mask(B, T, S) if in_axes[3] == 0 else _mask(T, S)

    def run(layer, **kwargs):
        def loss(layer):
            attend = functools.partial(layer, **kwargs)
            return jnp.sum(jnp.sin(jax.vmap(attend, in_axes)(*inputs, mask)))

        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(layer)

    got, want = run(ours, implementation=backend), run(theirs)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    _assert_close(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))


def test_mods_and_causal(backend):
    ours, theirs = _pair()
    x = normal(T, D)
    kwargs = {"causal": True, "implementation": backend}
    _assert_close(ours(x, x, x, **kwargs), theirs(x, x, x, np.tri(T, dtype=bool)))
    window = fkl_jax.SlidingWindow.last(3)
    got = ours(x, x, x, mask_mod=window, score_mod=fkl_jax.SoftCap(1e6), **kwargs)
    want = theirs(x, x, x, np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool))
    _assert_close(got, want)


def test_rows_without_a_key_are_zero():
    """The difference on purpose: Equinox gives such a row the mean of the values."""
    ours, _ = _pair()
    x = normal(T, D)
    mask = np.broadcast_to((np.arange(T) % 2 == 0)[:, None], (T, T))
    out = np.asarray(ours(x, x, x, mask))
    assert not out[1::2].any() and out[::2].any()


def test_dropout_is_refused_outside_inference():
    ours, theirs = _pair(dropout_p=0.1)
    x = normal(T, D)
    want = theirs(x, x, x, inference=True)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.1"):
        ours(x, x, x, key=jax.random.key(0))
    _assert_close(ours(x, x, x, inference=True), want)
    _assert_close(eqx.nn.inference_mode(ours)(x, x, x), want)
    inference, _ = _pair(dropout_p=0.1, inference=True)
    _assert_close(inference(x, x, x, key=jax.random.key(0)), want)
    with pytest.raises(NotImplementedError, match="dropout_p is 0.1"):
        inference(x, x, x, inference=False)
    with pytest.warns(UserWarning, match="deterministic"):
        ours(x, x, x, deterministic=True)


@pytest.mark.parametrize(
    "kwargs,kind,words",
    [
        ({"mask": _mask(T, T + 1)}, ValueError, r"\(7, 8\).*\(7, 7\)"),
        ({"mask": _mask(2, T, T)}, ValueError, r"\(2, 7, 7\)"),
        ({"mask": _mask(1, T)}, ValueError, r"\(1, 7\)"),
        ({"process_heads": lambda q, k, v: (q, k[1:], v)}, ValueError, "process_heads"),
        ({"value": normal(T + 1, D)}, ValueError, "length 7.*8"),
    ],
)
def test_wrong_arguments(kwargs, kind, words):
    ours, _ = _pair()
    x = normal(T, D)
    with pytest.raises(kind, match=words):
        ours(x, x, kwargs.pop("value", x), **kwargs)


def test_parameters_go_back_and_forth(tmp_path):
    ours, theirs = _pair(key=jax.random.key(1))
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", theirs)
    other, _ = _pair(key=jax.random.key(2))
    got = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", other)
    assert isinstance(got, MultiheadAttention)
    x = normal(T, D)
    _assert_close(got(x, x, x), theirs(x, x, x))
    _assert_close(ours(x, x, x), theirs(x, x, x))


# ---------------------------------------------------------------------------- training

VOCABULARY, LENGTH, STEPS = 16, 24, 12


class _Model(eqx.Module):
    embed: jax.Array
    attention: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, make_attention):
        keys = jax.random.split(jax.random.key(0), 4)
        self.embed = jax.random.normal(keys[0], (VOCABULARY, D)) / 4
        self.attention = [make_attention(k) for k in keys[1:3]]
        self.norm = eqx.nn.LayerNorm(D)
        self.head = eqx.nn.Linear(D, VOCABULARY, key=keys[3])

    def __call__(self, tokens, attend):
        x = self.embed[tokens]
        for layer in self.attention:
            x = x + attend(layer, jax.vmap(self.norm)(x))
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def _train(make_attention, attend):
    tokens = layers.make_tokens(VOCABULARY, 8, LENGTH + 1)
    model = _Model(make_attention)

    @eqx.filter_jit
    def step(model):
        def loss(model):
            logits = jax.vmap(lambda t: model(t, attend))(tokens[:, :-1])
            return layers.cross_entropy(logits, tokens[:, 1:])

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates = jax.tree.map(lambda g: -0.5 * g, grads)
        return value, eqx.apply_updates(model, updates)

    losses = []
    for _ in range(STEPS):
        value, model = step(model)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0], "the loss must fall"
    return losses, model


@compiled
def test_model_trains_alike(backend):
    mask = np.tri(LENGTH, dtype=bool)

    def run(layer_type, **kwargs):
        return _train(
            lambda key: layer_type(N, D, key=key),
            lambda layer, x: layer(x, x, x, mask, **kwargs),
        )[0]

    ours = run(MultiheadAttention, implementation=backend)
    # float32 in another order; a few steps leave the two little room to drift apart.
    np.testing.assert_allclose(ours, run(eqx.nn.MultiheadAttention), rtol=1e-4)


# --------------------------------------------------------------- GroupedQueryAttention


def _layer(**kwargs):
    kwargs = {"num_kv_heads": K, "key": jax.random.key(1), **kwargs}
    return GroupedQueryAttention(D, N, **kwargs)


GQA = {
    "plain": ({}, {}),
    "head_dim": ({"head_dim": 12, "output_size": 5, "num_kv_heads": 1}, {}),
    "no_rope": ({"rope_base": None, "num_kv_heads": None}, {"base": None}),
    "limits": (
        {"window": (3, 0), "soft_cap": 0.5, "rope_base": 100.0},
        {
            "base": 100.0,
            "live": np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool),
            "score": lambda s, h, q, k: np.tanh(2 * s) / 2,
        },
    ),
    "mods": (
        {
            "score_mod": lambda s, b, h, q, kv: s - 0.2 * h * (q - kv),
            "mask_mod": lambda b, h, q, kv: (q - kv) % 3 != 1,
            "causal": False,
        },
        {
            "score": lambda s, h, q, k: s - 0.2 * h * (q - k),
            "live": (np.arange(T)[:, None] - np.arange(T)) % 3 != 1,
        },
    ),
    "sinks": ({"use_sinks": True}, {"sinks": np.linspace(-1, 1, N)}),
}


@compiled
@pytest.mark.parametrize("name", GQA)
def test_layer_is_what_it_says(name, backend):
    arguments, expected = GQA[name]
    layer = _layer(**arguments, implementation=backend)
    if layer.sinks is not None:
        layer = eqx.tree_at(lambda m: m.sinks, layer, jnp.float32(expected["sinks"]))
    x = normal(T, D)
    weights = [
        np.asarray(p.weight).T.reshape(D, -1, layer.head_dim)
        for p in (layer.query_proj, layer.key_proj, layer.value_proj)
    ]
    out = np.asarray(layer.output_proj.weight).T.reshape(N, layer.head_dim, -1)
    expected = {"base": 10_000.0, "live": np.tri(T, dtype=bool), **expected}
    want = layers.grouped_query_attention(x, *weights, out, **expected)
    # Sums of at most 32 products around 1, five of them one after another.
    np.testing.assert_allclose(layer(x), want, atol=64 * layers.FLOAT32)


@compiled
def test_batch_by_vmap_equals_a_loop(backend):
    """Each with its own length, segment ids and positions."""
    layer = _layer(implementation=backend)
    x = normal(3, T, D)
    more = {
        "length": jnp.asarray([T, 5, 0]),
        "segment_ids": jnp.asarray(np.sort(np.arange(3 * T).reshape(3, T) % 3)),
        "positions": jnp.asarray(np.arange(3 * T).reshape(3, T)),
    }
    got = jax.jit(jax.vmap(lambda x, more: layer(x, **more)))(x, more)
    for i, row in enumerate(got):
        want = layer(x[i], **jax.tree.map(lambda a, i=i: a[i], more))
        np.testing.assert_allclose(row, want, atol=1e-6)
    assert not np.asarray(got[2]).any()


DECODE = {
    "plain": {},
    "limits_and_sinks": {"window": 3, "soft_cap": 1.0, "use_sinks": True},
    "no_rope_alibi": {"rope_base": None, "score_mod": fkl_jax.ALiBi(0.3)},
}


@compiled
@pytest.mark.parametrize("name", DECODE)
def test_decoding_equals_the_whole_sequence(name, backend):
    layer = _layer(**DECODE[name], implementation=backend)
    x = normal(T, D)
    want = layer(x)
    cache = layer.init_cache(T + 2)
    step = jax.jit(lambda x, cache: layer(x, cache=cache))
    rows = []
    for part in np.split(x, [3, 4, 5], axis=0):
        out, cache = step(part, cache)
        rows.append(out)
    np.testing.assert_allclose(jnp.concatenate(rows), want, atol=2e-6)


@compiled
def test_decoding_under_vmap_with_different_lengths(backend):
    layer = _layer(implementation=backend)
    x = normal(B, T, D)
    want = jax.vmap(layer)(x)
    empty = layer.init_cache(T)
    cache = jax.tree.map(lambda a: jnp.broadcast_to(a, (B, *a.shape)), empty)
    step = jax.jit(
        jax.vmap(lambda x, cache, n: layer(x, cache=cache, length=n), (0, 0, 0))
    )
    first, cache = step(x[:, :4], cache, jnp.asarray([2, 4]))
    np.testing.assert_allclose(first[0, :2], want[0, :2], atol=1e-6)
    np.testing.assert_allclose(first[1], want[1, :4], atol=1e-6)
    for i in range(3):
        rows = jnp.stack([x[0, 2 + i], x[1, 4 + i]])[:, None]
        got, cache = step(rows, cache, jnp.ones(B, jnp.int32))
        np.testing.assert_allclose(got[0, 0], want[0, 2 + i], atol=1e-6)
        np.testing.assert_allclose(got[1, 0], want[1, 4 + i], atol=1e-6)
    np.testing.assert_array_equal(cache.index, [5, 7])


def test_full_cache_is_an_error_or_nan():
    layer = _layer()
    x = normal(T, D)
    _, cache = layer(x[:-1], cache=layer.init_cache(T, jnp.bfloat16))
    assert cache.key.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="holds 7 .* 6 are in it and 2 more"):
        layer(x[:2], cache=cache)
    step = jax.jit(lambda x, cache: layer(x, cache=cache))
    out, cache = step(x[:1], cache)
    assert np.isfinite(out).all()
    assert np.isnan(step(x[:1], cache)[0]).all()
    with pytest.raises(ValueError, match="segment_ids"):
        layer(x, cache=cache, segment_ids=jnp.zeros(T, jnp.int32))


@pytest.mark.parametrize(
    "kwargs,words",
    [
        ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"window": 0}, "0"),
    ],
)
def test_layer_refuses_sizes(kwargs, words):
    with pytest.raises(ValueError, match=words):
        _layer(**kwargs)


@compiled
def test_layer_trains_with_the_parameters_of_its_mods(backend):
    """A ScoreMod's parameters are leaves of the layer; soft cap and window are not."""

    def make(key):
        slopes = jnp.full(N, 0.1)
        mod = fkl_jax.ALiBi(slopes)
        return _layer(
            score_mod=mod, soft_cap=20.0, window=8, use_sinks=True,
            implementation=backend, key=key,
        )  # fmt: skip

    _, model = _train(make, lambda layer, x: layer(x))
    for layer in model.attention:
        (alibi,) = layer.mods[0]
        assert np.all(np.asarray(alibi.params[0]) != np.float32(0.1))
        assert np.all(np.asarray(layer.sinks) != 0)
        assert len(jax.tree.leaves(layer)) == 6


def test_layers_under_scan_and_remat():
    """Parameters stacked by vmap, one scanned body, recomputed in the backward."""
    keys = jax.random.split(jax.random.key(0), 2)
    stacked = eqx.filter_vmap(lambda key: _layer(key=key, window=4))(keys)
    arrays, static = eqx.partition(stacked, eqx.is_array)
    x = normal(B, T, D)

    def body(x, arrays):
        layer = eqx.combine(arrays, static)
        return x + jax.vmap(layer)(x), None

    def scanned(arrays):
        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(body), x, arrays)[0]))

    def loop(arrays):
        h = x
        for i in range(2):
            h, _ = body(h, jax.tree.map(lambda a, i=i: a[i], arrays))
        return jnp.sum(jnp.sin(h))

    got, want = (jax.jit(jax.value_and_grad(f))(arrays) for f in (scanned, loop))
    _assert_close(jax.tree.leaves(got), jax.tree.leaves(want))


# ----------------------------------------------------------------- without Equinox


def test_import_without_equinox_says_what_to_install():
    script = """
import sys
sys.modules["equinox"] = None
try:
    import fkl_jax.equinox
except ModuleNotFoundError as e:
    assert e.name == "equinox" and 'pip install "fkl_jax[equinox]"' in str(e), e
else:
    raise AssertionError("imported")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- private -------------------------------------------------------------------------


def _assert_close(got, want):
    """Equal up to float32 rounding: sums of some hundred terms of about 1."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want
    )
