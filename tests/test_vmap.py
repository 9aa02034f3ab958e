"""vmap over any subset of operands, forward and gradients, against a Python loop."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import COMPILE_FAST

import fkl_jax

V, B, T, S, N, K, H = 3, 2, 6, 9, 4, 2, 8
R = 2

SHAPES = {
    "query": (B, T, N, H),
    "key": (B, S, K, H),
    "value": (B, S, K, H),
    "bias": (1, N, 1, S),
    "sinks": (N,),
    "scale": (),
    "slopes": (N,),
    "cap": (),
    "table": (N, 2 * R + 1),
    "per_batch": (B, N),
}
INTEGERS = {
    "q_seq_lengths": ((B,), T),
    "kv_seq_lengths": ((B,), S),
    "q_segment_ids": ((B, T), 2),
    "kv_segment_ids": ((B, S), 2),
    "q_offset": ((B,), 3),
    "kv_offset": ((), 3),
    "window": ((), 6),
    "dense": ((B, 1, T, S), 1),
    "block_mask": ((B, N, 2, 3), 1),
}
FLOATS = tuple(SHAPES)
EVERYTHING = (*SHAPES, *INTEGERS)


def _operands(lead: int) -> dict[str, jax.Array]:
    """Return every operand with `lead` versions of itself in front."""
    rng = np.random.default_rng(0)
    made = {}
    for name, shape in SHAPES.items():
        x = rng.standard_normal((lead, *shape))
        x = np.abs(x) + 0.5 if name in ("cap", "scale") else x
        made[name] = jnp.asarray(x, jnp.float32)
    for name, (shape, high) in INTEGERS.items():
        x = rng.integers(1 if high > 1 else 0, high + 1, (lead, *shape))
        if name in ("dense", "block_mask"):
            x = rng.random((lead, *shape)) < 0.8
        made[name] = jnp.asarray(x, bool if name in ("dense",) else jnp.int32)
    made["block_mask"] = made["block_mask"].astype(jnp.uint8)
    return made


def _attention(x: dict, implementation: str):
    def own(s, b, h, q_idx, kv_idx):
        # `b` must be the caller's, not one that counts the axes of vmap as well.
        return s + x["per_batch"][b, h] * jnp.sin(1.0 * b + kv_idx)

    # The smooth bias-like terms come first: a cap keeps their sum in range.
    return fkl_jax.attention_with_lse(
        x["query"],
        x["key"],
        x["value"],
        score_mod=(
            fkl_jax.ALiBi(x["slopes"]),
            fkl_jax.RelativeBias(x["table"]),
            own,
            fkl_jax.SoftCap(x["cap"]),
        ),
        mask_mod=(fkl_jax.SlidingWindow(x["window"], 3), fkl_jax.DenseMask(x["dense"])),
        block_mask=fkl_jax.BlockMask(x["block_mask"], block_q=4, block_kv=3),
        bias=x["bias"],
        scale=x["scale"],
        sinks=x["sinks"],
        q_segment_ids=x["q_segment_ids"],
        kv_segment_ids=x["kv_segment_ids"],
        q_seq_lengths=x["q_seq_lengths"],
        kv_seq_lengths=x["kv_seq_lengths"],
        q_offset=x["q_offset"],
        kv_offset=x["kv_offset"],
        implementation=implementation,
    )


def _value_and_grads(x: dict, cotangents, implementation: str):
    floats = {name: x[name] for name in FLOATS}
    rest = {name: x[name] for name in INTEGERS}
    results, vjp = jax.vjp(
        lambda floats: _attention({**floats, **rest}, implementation), floats
    )
    return results, vjp(cotangents)[0]


def _random_subsets(count: int) -> list[tuple[str, ...]]:
    pick = random.Random(0)
    return [
        tuple(sorted(pick.sample(EVERYTHING, pick.randint(2, len(EVERYTHING) - 1))))
        for _ in range(count)
    ]


@functools.lru_cache
def _one(implementation: str):
    return jax.jit(
        functools.partial(_value_and_grads, implementation=implementation),
        compiler_options=COMPILE_FAST,
    )


SUBSETS = [(name,) for name in EVERYTHING] + _random_subsets(6) + [EVERYTHING]


@pytest.mark.parametrize("mapped", SUBSETS, ids=lambda m: "+".join(m)[:60])
def test_vmap_with_random_cotangents_is_a_loop(mapped, backend):
    operands = _operands(V)
    cotangents = (
        jax.random.normal(jax.random.key(1), (V, B, T, N, H)),
        jax.random.normal(jax.random.key(2), (V, B, N, T)),
    )
    x = {k: v if k in mapped else v[0] for k, v in operands.items()}
    axes = {k: 0 if k in mapped else None for k in operands}
    got = jax.jit(
        jax.vmap(
            functools.partial(_value_and_grads, implementation=backend),
            in_axes=(axes, 0),
        ),
        compiler_options=COMPILE_FAST,
    )(x, cotangents)
    for n in range(V):
        one = {k: v[n] if k in mapped else v for k, v in x.items()}
        want = _one(backend)(one, jax.tree.map(lambda c, n=n: c[n], cotangents))
        _assert_close(jax.tree.map(lambda a, n=n: a[n], got), want)


@pytest.mark.parametrize("mapped", [("query",), ("key", "slopes"), ("window", "bias")])
def test_constant_cotangent_under_vmap(mapped, backend):
    """`grad(sum)` hands the backward an unmapped cotangent."""
    operands = _operands(V)
    x = {k: v if k in mapped else v[0] for k, v in operands.items()}
    axes = {k: 0 if k in mapped else None for k in operands}

    def total(floats, rest):
        return jnp.sum(_attention({**floats, **rest}, backend)[0])

    def grads(x):
        floats = {name: x[name] for name in FLOATS}
        return jax.grad(total)(floats, {name: x[name] for name in INTEGERS})

    got = jax.vmap(grads, in_axes=(axes,))(x)
    for n in range(V):
        one = {k: v[n] if k in mapped else v for k, v in x.items()}
        _assert_close(jax.tree.map(lambda a, n=n: a[n], got), grads(one))


def test_grad_outside_vmap(backend):
    """What is not mapped gets the sum of the gradients."""
    operands = _operands(V)
    mapped = ("query", "value", "cap", "per_batch", "dense")
    x = {k: v if k in mapped else v[0] for k, v in operands.items()}
    axes = {k: 0 if k in mapped else None for k in operands}
    weights = jax.random.normal(jax.random.key(1), (V, B, T, N, H))

    def loss(floats):
        full = {**x, **floats}
        out, _ = jax.vmap(
            functools.partial(_attention, implementation=backend), in_axes=(axes,)
        )(full)
        return jnp.sum(out * weights)

    def loop(floats):
        full = {**x, **floats}
        total = 0.0
        for n in range(V):
            one = {k: v[n] if k in mapped else v for k, v in full.items()}
            total += jnp.sum(_attention(one, backend)[0] * weights[n])
        return total

    floats = {name: x[name] for name in FLOATS}
    _assert_close(jax.jit(jax.grad(loss))(floats), jax.jit(jax.grad(loop))(floats))


def test_nested_vmap_with_other_axes(backend):
    """Two levels over different operands, from and to axes that are not the first."""
    x = {k: v[0] for k, v in _operands(1).items()}
    many = _operands(6)
    queries = jnp.moveaxis(many["query"][:2], 0, 3)  # mapped at axis 3
    slopes = jnp.moveaxis(many["slopes"][:3], 0, 1)  # mapped at axis 1

    def f(query, slopes):
        return _attention({**x, "query": query, "slopes": slopes}, backend)[0]

    inner = jax.vmap(f, in_axes=(3, None), out_axes=1)
    got = jax.vmap(inner, in_axes=(None, 1), out_axes=2)(queries, slopes)
    assert got.shape == (B, 2, 3, T, N, H)
    for i, j in itertools.product(range(2), range(3)):
        want = f(queries[..., i, :], slopes[:, j])
        _assert_close(got[:, i, j], want)


def test_b_stays_the_callers_under_vmap(backend):
    """vmap over the batch axis itself: inside, there is one batch element, number 0."""
    x = {k: v[0] for k, v in _operands(1).items()}
    table = jnp.arange(1.0, 5.0)

    def f(q, k, v):
        return fkl_jax.attention(
            q, k, v, implementation=backend,
            score_mod=lambda s, b, h, q_idx, kv_idx: s * table[b],
        )  # fmt: skip

    def want(q, k, v, factor):
        return fkl_jax.attention(q, k, v, scale=factor / H**0.5, implementation=backend)

    qkv = x["query"], x["key"], x["value"]
    inside = jax.vmap(f)(*qkv)
    _assert_close(inside, want(*qkv, 1.0))
    outside = f(*qkv)
    _assert_close(outside[1], want(*(a[1:] for a in qkv), 2.0)[0])


def test_vmap_of_nothing(backend):
    """A mapped axis of size 0 is an empty result, not a crash."""
    x = _operands(1)
    q = jnp.zeros((0, B, T, N, H))
    got = jax.vmap(
        lambda q: fkl_jax.attention(
            q, x["key"][0], x["value"][0], implementation=backend
        )
    )(q)
    assert got.shape == (0, B, T, N, H)


def _assert_close(got, want):
    """The two differ by the order of sums of some ten products at most."""

    def one(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        size = np.max(np.abs(b), initial=1.0, where=np.isfinite(b))
        np.testing.assert_allclose(
            a, b, rtol=1e-5, atol=1e-5 * size, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree_util.tree_map_with_path(one, got, want)
