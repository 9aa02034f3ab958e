"""`fkl_jax.flax`: inside Flax's own layers, and the layer that it adds."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax

# The `test` extra installs it (test_packaging.py); a machine made by hand may lack it.
pytest.importorskip("flax")

import layers
from flax import linen, nnx
from layers import normal

from fkl_jax.flax import GroupedQueryAttention, attention_fn

# What is tested here is in front of the backends; plain JAX, slow to compile, gets a
# few of these tests.
compiled = pytest.mark.backends("ffi", "cuda")

B, T, S, N, K, H, D = 2, 7, 10, 4, 2, 8, 32


# --------------------------------------------------------------- the function itself


def _mask(*shape):
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 0] = True  # Flax gives rows without a key the mean
    return mask


CASES = {
    "plain": {},
    "bias_broadcast": {"bias": normal(1, N, 1, S, seed=5)},
    "bias_two_axes": {"bias": normal(T, S, seed=5)},
    "mask_float": {"mask": _mask(B, 1, T, S).astype(np.float32)},
    "mask_of_keys": {"mask": _mask(B, 1, 1, S)},
    "mask_two_axes": {"mask": _mask(T, S)},
    "bias_and_mask": {"bias": normal(B, N, T, S, seed=5), "mask": _mask(1, 1, T, S)},
    "no_batch": {"batch": (), "mask": _mask(N, T, S), "bias": normal(1, T, S, seed=5)},
    "two_batch_axes": {"batch": (2, 3), "mask": _mask(2, 1, 1, 1, S)},
    "two_batch_axes_full": {"batch": (2, 3), "mask": _mask(2, 3, N, T, S)},
    "value_head_dim": {"value_head_dim": 5},
}


@compiled
@pytest.mark.parametrize("name", CASES)
def test_as_accurate_as_flax(name, backend):
    library = nnx if name == "bias_and_mask" else linen  # the formula is the same
    kwargs = dict(CASES[name])
    batch, hv = kwargs.pop("batch", (B,)), kwargs.pop("value_head_dim", H)
    floats = {
        "query": normal(*batch, T, N, H),
        "key": normal(*batch, S, N, H, seed=1),
        "value": normal(*batch, S, N, hv, seed=2),
    }
    if "bias" in kwargs:
        floats["bias"] = kwargs.pop("bias")
    weight = normal(*batch, T, N, hv, seed=3)
    others = {"weight": weight, **kwargs}

    def run(function, floats, others):
        def f(floats):
            mask = others.get("mask")
            out = function(**floats, mask=mask)
            return jnp.sum(out * others["weight"]), out

        (_, out), grads = jax.value_and_grad(f, has_aux=True)(floats)
        return out, grads

    ours = functools.partial(attention_fn, implementation=backend)
    theirs = _without_fast_path(library)
    got = jax.jit(functools.partial(run, ours))(floats, others)
    peer = jax.jit(functools.partial(run, theirs))(floats, others)
    exact = layers.in_float64(functools.partial(run, theirs), floats, others)
    layers.assert_as_accurate(got, peer, exact)


def _without_fast_path(library):
    """Flax's attention by einsum. NNX hands some calls to `jax.nn`, which takes only
    some shapes; dropout at a rate that drops nothing keeps it from that."""
    if library is linen:
        return linen.dot_product_attention
    return functools.partial(
        nnx.dot_product_attention, dropout_rate=1e-30, deterministic=True
    )


@compiled
def test_causal_and_grouped_heads(backend):
    q, k, v = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H, seed=2)
    got = attention_fn(q, k, v, is_causal=True, implementation=backend)
    want = nnx.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_mods_and_scale(backend):
    q, k, v = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H, seed=2)
    mods = dict(
        score_mod=(lambda s, b, h, q, kv: s - 0.1 * h * (q - kv), fkl_jax.SoftCap(2.0)),
        mask_mod=fkl_jax.SlidingWindow.last(3),
        scale=0.3,
        implementation=backend,
    )
    got = attention_fn(q, k, v, mask=np.tri(T), **mods)
    want = fkl_jax.attention(q, k, v, causal=True, **mods)
    np.testing.assert_allclose(got, want, atol=1e-6)


@compiled
def test_rows_without_a_key_are_zero(backend):
    """The difference on purpose: Flax gives such a row the mean of the values."""
    q = normal(B, T, N, H)
    mask = (np.arange(T) % 2 == 0)[:, None]
    out = np.asarray(attention_fn(q, q, q, mask=mask, implementation=backend))
    assert not out[:, 1::2].any() and out[:, ::2].any()


@pytest.mark.parametrize(
    "dtype,due", [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)]
)
def test_dtype(dtype, due):
    q, k = normal(B, T, N, H), normal(B, T, N, H)
    v = jnp.asarray(normal(B, T, N, H), jnp.bfloat16)
    out = attention_fn(q, k, v, dtype=dtype)
    assert out.dtype == due == nnx.dot_product_attention(q, k, v, dtype=dtype).dtype


@compiled
def test_precision(backend):
    q = normal(B, T, N, H)
    for precision in ("highest", jax.lax.Precision.HIGH, ("default", "default")):
        attention_fn(q, q, q, precision=precision, implementation=backend)
    with pytest.raises(ValueError, match="precision.*high"):
        attention_fn(q, q, q, precision=("high", "default"))


@pytest.mark.parametrize(
    "kwargs,kind,words",
    [
        ({"dropout_rate": 0.1}, NotImplementedError, "dropout_rate is 0.1"),
        ({"einsum_dot_general": max}, NotImplementedError, "einsum_dot_general"),
        ({"qk_attn_weights_einsum": max}, NotImplementedError, "qk_attn_weights"),
        ({"attn_weights_value_einsum": max}, NotImplementedError, "attn_weights_value"),
        ({"mask": np.ones((T, T + 1), bool)}, ValueError, r"\(7, 8\).*\(2, 4, 7, 7\)"),
        ({"bias": np.ones((3, T, T))}, ValueError, "bias"),
    ],
)
def test_what_is_not_done_is_refused(kwargs, kind, words):
    q = normal(B, T, N, H)
    with pytest.raises(kind, match=words):
        attention_fn(q, q, q, **kwargs)


def test_dropout_in_deterministic_mode_is_none():
    q = normal(B, T, N, H)
    got = attention_fn(q, q, q, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(got, attention_fn(q, q, q))


# ---------------------------------------------------------------- in Flax's own layers


def _nnx_layer(attention, **kwargs):
    kwargs = {"decode": False, **kwargs}
    return nnx.MultiHeadAttention(
        N, D, rngs=nnx.Rngs(0), attention_fn=attention, **kwargs
    )


def _linen_layer(attention, **kwargs):
    return linen.MultiHeadDotProductAttention(N, attention_fn=attention, **kwargs)


@compiled
def test_nnx_layer(backend):
    ours = functools.partial(attention_fn, implementation=backend)
    x, mask = normal(B, T, D), linen.make_causal_mask(jnp.ones((B, T)))

    def run(layer):
        def loss(layer):
            return jnp.sum(jnp.sin(layer(x, mask=mask)))

        return nnx.jit(nnx.value_and_grad(loss))(layer)

    kwargs = {"normalize_qk": True, "num_kv_heads": K}
    got = run(_nnx_layer(ours, **kwargs))
    want = run(_nnx_layer(nnx.dot_product_attention, **kwargs))
    _assert_close(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(want[1]))
    _assert_close(got[0], want[0])


@compiled
def test_linen_layer(backend):
    ours = functools.partial(attention_fn, implementation=backend)
    x, mask = normal(B, T, D), linen.make_causal_mask(jnp.ones((B, T)))
    params = _linen_layer(ours).init(jax.random.key(0), x)

    def run(attention):
        layer = _linen_layer(attention, force_fp32_for_softmax=True)

        def loss(params):
            return jnp.sum(jnp.sin(layer.apply(params, x, mask=mask)))

        return jax.jit(jax.value_and_grad(loss))(params)

    _assert_close(run(ours), run(linen.dot_product_attention))


def test_nnx_layer_with_mods():
    """A partial of the function is static: no array of it gets into the state."""
    with_cap = functools.partial(attention_fn, score_mod=fkl_jax.SoftCap(1e6))
    layer, plain = _nnx_layer(with_cap), _nnx_layer(attention_fn)
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(plain))
    x = normal(B, T, D)
    _assert_close(nnx.jit(lambda m, x: m(x))(layer, x), plain(x))


def test_nnx_dropout_is_refused_in_training_only():
    layer = _nnx_layer(attention_fn, dropout_rate=0.1, deterministic=False)
    x = normal(B, T, D)
    with pytest.raises(NotImplementedError, match="dropout_rate is 0.1"):
        layer(x)
    layer(x, deterministic=True)


def test_nnx_sown_weights():
    x, mask = normal(B, T, D), linen.make_causal_mask(jnp.ones((B, T)))

    def run(attention):
        def forward(layer, x):
            return layer(x, mask=mask, sow_weights=True)

        return nnx.capture(forward, nnx.Intermediate)(_nnx_layer(attention), x)

    (out, sown), (want_out, want) = run(attention_fn), run(nnx.dot_product_attention)
    _assert_close(out, want_out)
    _assert_close(nnx.to_pure_dict(sown), nnx.to_pure_dict(want))


def test_linen_sown_weights():
    x, mask = normal(B, T, D), linen.make_causal_mask(jnp.ones((B, T)))
    params = _linen_layer(attention_fn).init(jax.random.key(0), x)

    def run(attention):
        layer = _linen_layer(attention)
        kwargs = dict(mask=mask, sow_weights=True, mutable=["intermediates"])
        return layer.apply(params, x, **kwargs)

    got, want = run(attention_fn), run(linen.dot_product_attention)
    _assert_close(got, want)
    assert got[1]["intermediates"]["attention_weights"][0].shape == (B, N, T, T)


@compiled
def test_nnx_decoding(backend):
    layer = _nnx_layer(functools.partial(attention_fn, implementation=backend))
    x = normal(B, T, D)
    want = layer(x, mask=linen.make_causal_mask(jnp.ones((B, T))))
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    got = jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(T)], axis=1)
    _assert_close(got, want)


@compiled
def test_linen_decoding(backend):
    ours = functools.partial(attention_fn, implementation=backend)
    x = normal(B, T, D)
    variables = _linen_layer(ours, decode=True).init(jax.random.key(0), x)
    params, cache = variables["params"], variables["cache"]
    want = _linen_layer(ours).apply(
        {"params": params}, x, mask=linen.make_causal_mask(jnp.ones((B, T)))
    )

    @jax.jit
    def step(cache, x):
        layer = _linen_layer(ours, decode=True)
        out, new = layer.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return out, new["cache"]

    rows = []
    for i in range(T):
        out, cache = step(cache, x[:, i : i + 1])
        rows.append(out)
    _assert_close(jnp.concatenate(rows, axis=1), want)


# ---------------------------------------------------------------------------- training

VOCABULARY, LENGTH, STEPS = 16, 24, 12


class _NnxModel(nnx.Module):
    def __init__(self, make_attention, rngs):
        self.embed = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.attention = nnx.List([make_attention(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, **kwargs):
        x = self.embed(tokens)
        for layer in self.attention:
            x = x + layer(self.norm(x), **kwargs)
        return self.head(self.norm(x))


def _train_nnx(make_attention, tokens, **kwargs):
    model = _NnxModel(make_attention, nnx.Rngs(0))

    @nnx.jit
    def step(model):
        def loss(model):
            logits = model(tokens[:, :-1], **kwargs)
            return layers.cross_entropy(logits, tokens[:, 1:])

        value, grads = nnx.value_and_grad(loss)(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
        return value

    return [float(step(model)) for _ in range(STEPS)]


def _assert_trains_alike(ours, theirs):
    # float32 in another order; a few steps leave the two little room to drift apart.
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert ours[-1] < 0.9 * ours[0], "the loss must fall"


@compiled
def test_nnx_model_trains_alike(backend):
    tokens = layers.make_tokens(VOCABULARY, 8, LENGTH + 1)
    mask = linen.make_causal_mask(tokens[:, :-1])

    def make(attention):
        return lambda rngs: nnx.MultiHeadAttention(
            N, D, decode=False, attention_fn=attention, rngs=rngs
        )

    ours = functools.partial(attention_fn, implementation=backend)
    _assert_trains_alike(
        _train_nnx(make(ours), tokens, mask=mask),
        _train_nnx(make(nnx.dot_product_attention), tokens, mask=mask),
    )


class _LinenModel(linen.Module):
    attention: object

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, D)(tokens)
        mask = linen.make_causal_mask(tokens)
        for _ in range(2):
            layer = linen.MultiHeadDotProductAttention(N, attention_fn=self.attention)
            x = x + layer(linen.LayerNorm()(x), mask=mask)
        return linen.Dense(VOCABULARY)(linen.LayerNorm()(x))


@compiled
def test_linen_model_trains_alike(backend):
    tokens = layers.make_tokens(VOCABULARY, 8, LENGTH + 1)

    def train(attention):
        model = _LinenModel(attention)
        params = model.init(jax.random.key(0), tokens[:, :-1])

        @jax.jit
        def step(params):
            def loss(p):
                return layers.cross_entropy(
                    model.apply(p, tokens[:, :-1]), tokens[:, 1:]
                )

            value, grads = jax.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

        losses = []
        for _ in range(STEPS):
            value, params = step(params)
            losses.append(float(value))
        return losses

    ours = functools.partial(attention_fn, implementation=backend)
    _assert_trains_alike(train(ours), train(linen.dot_product_attention))


# --------------------------------------------------------------- GroupedQueryAttention


def _layer(**kwargs):
    kwargs = {"num_kv_heads": K, "rngs": nnx.Rngs(1), **kwargs}
    return GroupedQueryAttention(D, N, **kwargs)


def _causal(t):
    return np.tri(t, dtype=bool)


def _window(t, w):
    return np.tri(t, dtype=bool) & ~np.tri(t, k=-w, dtype=bool)


GQA = {
    "plain": ({}, {}),
    "multi_query": ({"num_kv_heads": 1}, {}),
    "every_head": ({"num_kv_heads": None}, {}),
    "head_dim": ({"head_dim": 12, "out_features": 5}, {}),
    "no_rope": ({"rope_base": None}, {"base": None}),
    "rope_base": ({"rope_base": 100.0}, {"base": 100.0}),
    "window": ({"window": 3}, {"live": _window(T, 3)}),
    "two_sided_window": (
        {"window": (2, 1), "causal": False},
        {"live": _window(T, 3) | np.eye(T, k=1, dtype=bool)},
    ),
    "not_causal": ({"causal": False}, {"live": np.ones((T, T), bool)}),
    "soft_cap": ({"soft_cap": 0.5}, {"score": lambda s, h, q, k: np.tanh(2 * s) / 2}),
    "mods": (
        {
            "score_mod": lambda s, b, h, q, kv: s - 0.2 * h * (q - kv),
            "soft_cap": 2.0,
            "mask_mod": lambda b, h, q, kv: (q - kv) % 3 != 1,
        },
        {
            "score": lambda s, h, q, k: 2 * np.tanh((s - 0.2 * h * (q - k)) / 2),
            "live": _causal(T) & ((np.arange(T)[:, None] - np.arange(T)) % 3 != 1),
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
        layer.sinks[...] = jnp.asarray(expected["sinks"], jnp.float32)
    x = normal(B, T, D)
    got = layer(x)
    weights = [
        np.asarray(p.kernel[...])
        for p in (layer.query, layer.key, layer.value, layer.out)
    ]
    expected = {"base": 10_000.0, "live": _causal(T), **expected}
    want = [layers.grouped_query_attention(row, *weights, **expected) for row in x]
    # Sums of at most 32 products around 1, five of them one after another.
    np.testing.assert_allclose(got, np.stack(want), atol=64 * layers.FLOAT32)


def test_layer_with_any_batch_axes():
    layer = _layer()
    x = normal(2, 3, T, D)
    want = layer(x.reshape(6, T, D)).reshape(2, 3, T, D)
    np.testing.assert_allclose(layer(x), want, atol=1e-6)
    np.testing.assert_allclose(layer(x[0, 0]), want[0, 0], atol=1e-6)


@compiled
def test_packed_sequences_equal_single_ones(backend):
    layer = _layer(implementation=backend)
    x = normal(1, 7, D)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1]])
    positions = jnp.asarray([0, 1, 2, 0, 1, 2, 3])
    got = layer(x, segment_ids=ids, positions=positions)
    want = jnp.concatenate([layer(x[:, :3]), layer(x[:, 3:])], axis=1)
    np.testing.assert_allclose(got, want, atol=1e-6)


@compiled
def test_padded_sequences_equal_short_ones(backend):
    layer = _layer(implementation=backend, causal=False)
    x = normal(B, T, D)
    x[0, 4:] = np.nan  # nothing beyond the length may be looked at
    got = layer(x, lengths=jnp.asarray([4, T]))
    np.testing.assert_allclose(got[0, :4], layer(x[:1, :4])[0], atol=1e-6)
    np.testing.assert_allclose(got[1], layer(x[1:])[0], atol=1e-6)


def test_parameters_of_a_mod_in_the_call_are_trained():
    layer = _layer()
    x = normal(B, T, D)

    def loss(slopes):
        return jnp.sum(layer(x, score_mod=fkl_jax.ALiBi(slopes)) ** 2)

    grad = jax.grad(loss)(jnp.full(N, 0.1))
    assert np.all(np.abs(grad) > 0)


DECODE = {
    "plain": {},
    "window_and_cap": {"window": 3, "soft_cap": 1.0},
    "no_rope_alibi": {"rope_base": None, "score_mod": fkl_jax.ALiBi(0.3)},
    "index_mask": {"mask_mod": lambda b, h, q, kv: (q % 2 == h % 2) | (kv == q)},
    "sinks": {"use_sinks": True},
}


@compiled
@pytest.mark.parametrize("name", DECODE)
@pytest.mark.parametrize("chunks", [[1] * T, [4, 1, 2]], ids=["steps", "chunks"])
def test_decoding_equals_the_whole_sequence(name, chunks, backend):
    layer = _layer(**DECODE[name], implementation=backend)
    x = normal(B, T, D)
    want = layer(x)
    layer.init_cache((B, T + 3, D))
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    got = [step(layer, part) for part in np.split(x, np.cumsum(chunks)[:-1], axis=1)]
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, atol=2e-6)


@compiled
def test_decoding_with_prompts_of_different_lengths(backend):
    layer = _layer(implementation=backend, decode=True)
    x = normal(B, T, D)
    want = layer(x, decode=False)
    layer.init_cache(x.shape)
    first = layer(x[:, :4], lengths=jnp.asarray([2, 4]))
    np.testing.assert_allclose(first[0, :2], want[0, :2], atol=1e-6)
    np.testing.assert_allclose(first[1], want[1, :4], atol=1e-6)
    np.testing.assert_array_equal(layer.cache_index[...], [2, 4])
    for i in range(3):
        rows = jnp.stack([x[0, 2 + i], x[1, 4 + i]])[:, None]
        got = layer(rows)
        np.testing.assert_allclose(got[0, 0], want[0, 2 + i], atol=1e-6)
        np.testing.assert_allclose(got[1, 0], want[1, 4 + i], atol=1e-6)


def test_full_cache_is_an_error_or_nan():
    layer = _layer()
    x = normal(B, T, D)
    layer.init_cache((B, T, D), jnp.bfloat16)
    assert layer.cached_key.dtype == jnp.bfloat16
    assert layer(x[:, :-1], decode=True).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"holds 7 .* \[6 6\] are in it and 2 more"):
        layer(x[:, :2], decode=True)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    assert np.isfinite(step(layer, x[:, :1])).all()
    assert np.isnan(step(layer, x[:, :1])).all()


def test_layer_refuses_what_it_cannot_do():
    x = normal(B, T, D)
    layer = _layer()
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    layer.init_cache((B + 1, T, D))
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        layer(x, decode=True)
    layer.init_cache((B, T, D))
    with pytest.raises(ValueError, match="segment_ids"):
        layer(x, decode=True, segment_ids=jnp.zeros((B, T), jnp.int32))
    with pytest.raises(TypeError, match="q_seq_lengths"):
        layer(x, decode=True, lengths=jnp.ones(B))
    assert not layer.cache_index[...].any() and not layer.cached_key[...].any()


@pytest.mark.parametrize(
    "kwargs,words",
    [
        ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"window": 0}, "0"),
        ({"window": (-1, 0)}, "-1"),
    ],
)
def test_layer_refuses_sizes(kwargs, words):
    with pytest.raises(ValueError, match=words):
        _layer(**kwargs)
    with pytest.raises(ValueError, match="33 features"):
        GroupedQueryAttention(33, 4, rngs=nnx.Rngs(0))


@compiled
def test_layer_trains_and_its_state_is_only_parameters(backend):
    def make(rngs):
        return GroupedQueryAttention(
            D, N, K, window=8, soft_cap=20.0, implementation=backend, rngs=rngs
        )

    model = _NnxModel(make, nnx.Rngs(0))
    nnx.split(model, nnx.Param)  # raises if there is anything else
    losses = _train_nnx(make, layers.make_tokens(VOCABULARY, 8, LENGTH + 1))
    assert losses[-1] < 0.9 * losses[0]


def test_layers_under_scan_and_remat():
    """Parameters stacked by vmap, one scanned body, recomputed in the backward."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
        return GroupedQueryAttention(D, N, K, window=4, rngs=rngs)

    stacked = stack(nnx.Rngs(0))
    graph, state = nnx.split(stacked)
    x = normal(B, T, D)

    def body(x, state):
        return x + nnx.merge(graph, state)(x), None

    def loss(state, body):
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, state)[0]))

    def loop(state):
        h = x
        for i in range(2):
            h, _ = body(h, jax.tree.map(lambda a, i=i: a[i], state))
        return jnp.sum(jnp.sin(h))

    want = jax.jit(jax.value_and_grad(loop))(state)
    got = jax.jit(jax.value_and_grad(lambda s: loss(s, jax.checkpoint(body))))(state)
    _assert_close(got, want)


def test_layer_is_exported():
    layer = _layer(window=3, implementation="ffi")
    x = jnp.asarray(normal(B, T, D))
    graph, state = nnx.split(layer)
    exported = jax.export.export(
        jax.jit(lambda state, x: nnx.merge(graph, state)(x)),
        platforms=("cpu",),
        disabled_checks=fkl_jax.export_checks(),
    )(nnx.to_pure_dict(state), x)
    with jax.default_device(jax.devices("cpu")[0]):
        got = exported.call(nnx.to_pure_dict(state), x)
        np.testing.assert_allclose(got, layer(x), atol=1e-6)


# ------------------------------------------------------------------- without Flax


def test_import_without_flax_says_what_to_install():
    script = """
import sys
sys.modules["flax"] = None
try:
    import fkl_jax.flax
except ModuleNotFoundError as e:
    assert e.name == "flax" and 'pip install "fkl_jax[flax]"' in str(e), e
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
