"""The forward, and gradients with `deterministic=True`, are the same to the bit every
time, whatever ran before and whatever memory held.

`FKL_JAX_TEST_REPEATS` is the number of launches of each call in the long tests, 1000 if
not set.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax

REPEATS = int(os.environ.get("FKL_JAX_TEST_REPEATS", "1000"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A call; `T` and `S` from `lengths`, heads of query and of key/value."""

    name: str
    batch: int = 2
    lengths: tuple[int, int] = (333, 333)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "bfloat16"
    options: tuple[str, ...] = ()


# On a GPU of compute capability 9.0: both tiled forward kernels, the newer one
# persistent and not, and the decoding kernel with and without a split.
FORWARD = [
    Config(name="causal", options=("causal",)),
    Config(name="persistent", batch=8, heads=(16, 16), options=("causal",)),
    Config(name="H=128", head_dim=128, heads=(8, 8), lengths=(700, 1025)),
    Config(name="H=256", head_dim=256, heads=(2, 2)),
    Config(name="H=40 soft cap", head_dim=40, options=("soft_cap", "causal")),
    Config(name="window", head_dim=128, options=("window", "sinks")),
    Config(name="blocks", heads=(4, 4), options=("blocks",)),
    Config(name="segments", options=("segments", "alibi")),
    Config(name="float32", dtype="float32", head_dim=33, options=("causal",)),
    Config(name="float16", dtype="float16", head_dim=96),
    Config(name="decode", batch=3, lengths=(1, 5000), heads=(8, 2), head_dim=128),
    Config(name="decode, one part", batch=40, lengths=(2, 300), heads=(8, 8)),
]
GRADIENTS = [
    Config(name="causal", options=("causal",)),
    Config(name="H=128", head_dim=128, heads=(4, 4), lengths=(200, 641)),
    Config(name="H=256", head_dim=256, heads=(2, 1), lengths=(100, 100)),
    Config(name="soft cap, window", options=("soft_cap", "window", "sinks")),
    Config(name="blocks", heads=(4, 4), options=("blocks",)),
    Config(name="segments", options=("segments",)),
    Config(name="float32", dtype="float32", head_dim=33, options=("causal",)),
    Config(name="decode", lengths=(3, 2000), heads=(8, 2), head_dim=128),
]


def operands(config: Config) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(len(config.name)), 4)
    t, s = config.lengths
    shapes = [(t, config.heads[0]), *[(s, config.heads[1])] * 2, (t, config.heads[0])]
    return tuple(
        jax.random.normal(key, (config.batch, *shape, config.head_dim), config.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )


def arguments(config: Config) -> dict[str, Any]:
    t, s = config.lengths
    rng = np.random.default_rng(0)
    kwargs: dict[str, Any] = {}
    for option in config.options:
        match option:
            case "causal":
                kwargs["causal"] = "bottom_right"
            case "soft_cap":
                kwargs["score_mod"] = fkl_jax.SoftCap(jnp.float32(1.5))
            case "alibi":
                slopes = jnp.geomspace(0.5, 0.01, config.heads[0], dtype=jnp.float32)
                kwargs["score_mod"] = fkl_jax.ALiBi(slopes)
            case "window":
                kwargs["mask_mod"] = fkl_jax.SlidingWindow(jnp.int32(50), jnp.int32(9))
            case "sinks":
                kwargs["sinks"] = jnp.linspace(-1, 1, config.heads[0])
            case "blocks":
                shape = (1, config.heads[0], -(-t // 32), -(-s // 64))
                mask = jnp.asarray(rng.random(shape) < 0.4)
                kwargs["block_mask"] = fkl_jax.BlockMask(mask, 32, 64)
            case "segments":
                ids = np.sort(rng.integers(-1, 5, (config.batch, s)), axis=-1)
                kwargs["q_segment_ids"] = jnp.asarray(ids[:, :t], jnp.int32)
                kwargs["kv_segment_ids"] = jnp.asarray(ids, jnp.int32)
    return kwargs


def forward(config: Config):
    """Return a function without arguments: out and lse."""
    *qkv, _ = operands(config)
    kwargs = arguments(config)
    call = jax.jit(
        lambda *qkv: fkl_jax.attention_with_lse(*qkv, implementation="ffi", **kwargs)
    )
    return lambda: call(*qkv)


def gradients(config: Config):
    """Return a function without arguments: dquery, dkey, dvalue."""
    *qkv, dout = operands(config)
    kwargs = arguments(config)

    @jax.jit
    def call(dout, *qkv):
        _, vjp = jax.vjp(
            lambda *qkv: fkl_jax.attention(
                *qkv, implementation="ffi", deterministic=True, **kwargs
            ),
            *qkv,
        )
        return vjp(dout)

    return lambda: call(dout, *qkv)


@jax.jit
def same_bits(a, b):
    """True if two trees of arrays are the same to the bit, NaN included."""

    def bits(x):
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    return jnp.all(
        jnp.stack([jnp.all(bits(x) == bits(y)) for x, y in zip(a, b, strict=True)])
    )


def poison_like(results):
    """Return a function that makes arrays of NaN, of the sizes of the results and of
    others. When they are freed, results and workspaces come to lie there."""
    shapes = [(x.shape, x.dtype) for x in results for _ in range(2)]
    shapes += [((1 << n,), jnp.float32) for n in range(8, 22)]
    return jax.jit(lambda: [jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes])


def check_repeats(calls, repeats):
    """Run all calls in turn, `repeats` times, with poisoned memory before each."""
    first = {name: call() for name, call in calls.items()}
    for name, results in first.items():
        assert all(not np.isnan(np.asarray(x, np.float32)).any() for x in results), name
    poison = {name: poison_like(results) for name, results in first.items()}
    is_same = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            poison[name]()
            is_same[name].append(same_bits(call(), first[name]))
    for name, flags in is_same.items():
        wrong = np.flatnonzero(~np.asarray(jnp.stack(flags)))
        assert wrong.size == 0, f"{name}: {wrong.size} of {repeats}, first {wrong[0]}"


def named(make, configs):
    return {config.name: make(config) for config in configs}


@pytest.mark.backends("ffi", "cuda")
def test_forward(backend):
    check_repeats(named(forward, [FORWARD[0], FORWARD[-2]]), 3)


@pytest.mark.backends("ffi", "cuda")
def test_gradients(backend):
    check_repeats(named(gradients, GRADIENTS[:1] + GRADIENTS[-1:]), 3)


def test_a_different_bit_is_seen():
    x = jnp.arange(4, dtype=jnp.bfloat16)
    calls = iter([x, x, x.at[2].add(0.0625)])
    with pytest.raises(AssertionError, match="x: 1 of 2, first 1"):
        check_repeats({"x": lambda: (next(calls),)}, 2)


@pytest.mark.long
@pytest.mark.backends("cuda")
def test_forward_many_times(backend):
    check_repeats(named(forward, FORWARD), REPEATS)


@pytest.mark.long
@pytest.mark.backends("cuda")
def test_gradients_many_times(backend):
    check_repeats(named(gradients, GRADIENTS), REPEATS)
