"""What the tests of the layers share: tolerances earned in float64, a written-out
grouped-query layer, and a loop that trains."""

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32 = float(np.finfo(np.float32).eps)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def in_float64(function, *args):
    """What `function` gives for float64 arguments, as numpy arrays."""
    with jax.enable_x64(True):
        args = jax.tree.map(
            lambda x: jnp.asarray(
                x, jnp.float64 if np.issubdtype(x.dtype, np.floating) else None
            ),
            args,
        )
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


def assert_as_accurate(got, peer, exact):
    """Every array errs at most twice as much as the peer's float32 result, and never
    less is asked than a few units in its last place. One that is zero but for the
    rounding, as the gradient of a bias of all keys, holds what is left of terms that
    cancel: two such rests are compared with the largest array instead."""
    assert jax.tree.structure(got) == jax.tree.structure(peer)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(exact))

    def check(got, peer, exact):
        assert got.shape == peer.shape and got.dtype == peer.dtype
        error, theirs = (np.abs(np.asarray(x) - exact).max() for x in (got, peer))
        size = np.abs(exact).max()
        floor = FLOAT32 * (8 * size if size > 1e-12 * largest else largest)
        assert error <= 2 * theirs + floor, (error, theirs, floor)

    jax.tree.map(check, got, peer, exact)


def rotate(x, positions, base):
    """Rotary positions as complex numbers; x is (T, N, H)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = positions[:, None] * base ** (-np.arange(half) / half)
    pairs = pairs * np.exp(1j * angle)[:, None, :]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def grouped_query_attention(
    x, query, key, value, out, *, base, live, score=lambda s, h, q, kv: s, sinks=None
):
    """The layer in float64 for one sequence x (T, D).

    query, key, value: (D, heads, H); out: (N, H, D); live: bool (T, T); sinks: (N,).
    """
    x, query, key, value, out = (np.float64(a) for a in (x, query, key, value, out))
    t, n = len(x), query.shape[1]
    q, k, v = (np.einsum("td,dnh->tnh", x, w) for w in (query, key, value))
    if base is not None:
        q, k = (rotate(a, np.arange(t), base) for a in (q, k))
    k, v = (np.repeat(a, n // a.shape[1], axis=1) for a in (k, v))
    s = np.einsum("inh,jnh->nij", q, k) / np.sqrt(q.shape[-1])
    s = score(
        s, np.arange(n)[:, None, None], np.arange(t)[:, None], np.arange(t)[None, :]
    )
    p = np.where(live, np.exp(s), 0)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.float64(sinks))[:, None, None]
    p = p / np.where(total == 0, 1, total)
    return np.einsum("nij,jnh,nhd->id", p, v, out)


def make_tokens(vocabulary, num, length):
    """Sequences in which a token is a function of the one before it, most times."""
    rng = np.random.default_rng(0)
    table = rng.permutation(vocabulary)
    tokens = np.zeros((num, length), np.int32)
    tokens[:, 0] = rng.integers(0, vocabulary, num)
    for i in range(1, length):
        random = rng.integers(0, vocabulary, num)
        tokens[:, i] = np.where(rng.random(num) < 0.9, table[tokens[:, i - 1]], random)
    return jnp.asarray(tokens)


def cross_entropy(logits, targets):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.mean(chosen)
