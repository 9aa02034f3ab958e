"""A new value never compiles, a new kind always does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax

B, T, S, N, K, H = 2, 8, 12, 4, 2, 8
CALLS = 50


def _qkv(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)


def _new_values(n: int) -> dict:
    """Return arguments that differ in every value from those for another `n`.

    Numbers are Python numbers where a user would write one.
    """
    rng = np.random.default_rng(n)
    far = n % 5  # the offsets; what is compared with positions grows by as much
    return dict(
        score_mod=(
            fkl_jax.ALiBi(rng.standard_normal(N).astype(np.float32)),
            fkl_jax.RelativeBias(rng.standard_normal((N, 5)).astype(np.float32)),
            fkl_jax.Temperature(1.0 + n),
            fkl_jax.SoftCap(10.0 + n),
        ),
        mask_mod=(
            fkl_jax.SlidingWindow(5 + n, 3 + n),
            fkl_jax.PrefixLM(3 + n),
            fkl_jax.Padding(rng.integers(4, S, B).astype(np.int32) + far),
            fkl_jax.DenseMask(rng.random((T + 12, S + 12)) < 0.9),
            fkl_jax.SegmentIds(
                rng.integers(0, 2, (B, T + 12)).astype(np.int32),
                rng.integers(0, 2, (B, S + 12)).astype(np.int32),
            ),
        ),
        block_mask=fkl_jax.BlockMask(
            rng.random((B, N, 2, 3)) < 0.7, block_q=4, block_kv=4
        ),
        bias=rng.standard_normal((1, N, T, S)).astype(np.float32),
        scale=0.1 + n,
        sinks=rng.standard_normal(N).astype(np.float32),
        causal=True,
        q_offset=far + 5,
        kv_offset=far,
        q_seq_lengths=rng.integers(4, T, B).astype(np.int32),
        kv_seq_lengths=rng.integers(4, S, B).astype(np.int32),
        q_segment_ids=rng.integers(0, 2, (B, T)).astype(np.int32),
        kv_segment_ids=rng.integers(0, 2, (B, S)).astype(np.int32),
    )


def test_new_values_never_compile(backend, count_compiles):
    """50 eager calls: everything was compiled after the first."""
    qkv = _qkv()

    def attend(n):
        return fkl_jax.attention(
            *qkv, **_new_values(n), implementation=backend
        ).block_until_ready()

    jax.clear_caches()
    first = attend(0)
    with count_compiles() as counts:
        rest = [attend(n) for n in range(1, CALLS)]
    assert counts.compiles == 0
    assert len({np.asarray(x).tobytes() for x in [first, *rest]}) == CALLS


def test_new_values_never_compile_in_gradients(backend, count_compiles):
    qkv = _qkv()

    def grad(n):
        values = _new_values(n)
        return jax.block_until_ready(
            jax.grad(
                lambda *qkv: jnp.sum(
                    fkl_jax.attention(*qkv, **values, implementation=backend) ** 2
                ),
                (0, 1, 2),
            )(*qkv)
        )

    grad(0)
    with count_compiles() as counts:
        for n in range(1, 10):
            grad(n)
    assert counts.compiles == 0


def test_mods_and_masks_are_arguments_of_jit(backend, count_compiles):
    """50 calls of a jitted function that takes the mods themselves: one compile."""

    @jax.jit
    def attend(qkv, values):
        return fkl_jax.attention(*qkv, **values, causal=True, implementation=backend)

    qkv = _qkv()
    calls = []
    for n in range(CALLS):
        values = _new_values(n)
        del values["causal"]  # static, unlike all the others
        calls.append(jax.tree.map(jnp.asarray, values))
    with count_compiles() as counts:
        for values in calls:
            jax.block_until_ready(attend(qkv, values))
    assert counts.compiles == 1


def test_equal_function_made_anew_neither_compiles_nor_retraces(
    backend, count_compiles
):
    """What counts is what a function computes, not which object it is."""
    qkv = _qkv()

    def attend(n):
        slopes = jnp.full((N,), 1.0 + n)
        return fkl_jax.attention(
            *qkv,
            score_mod=lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx),
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4,
            implementation=backend,
        ).block_until_ready()

    attend(0)
    with count_compiles() as counts:
        attend(1)
    assert counts.compiles == 0
    # Each call traces the two functions on scalars; nothing larger is traced again.
    assert len(counts.traces) <= 4, counts.traces


def test_differently_written_equal_functions_share(backend, count_compiles):
    """Dead code and repeated expressions are not part of a program's identity."""
    qkv = _qkv()

    def attend(mod):
        return fkl_jax.attention(
            *qkv, score_mod=mod, implementation=backend
        ).block_until_ready()

    def one(s, b, h, q_idx, kv_idx):
        return jnp.tanh(s) - jnp.cos(1.0 * (q_idx - kv_idx)) * jnp.cos(
            1.0 * (q_idx - kv_idx)
        )

    def other(score, batch, head, i, j):
        unused = jnp.exp(score) + i
        capped = jnp.tanh(score)
        wave = jnp.cos(1.0 * (i - j))
        del unused
        return capped - wave * wave

    first = attend(one)
    with count_compiles() as counts:
        second = attend(other)
    assert counts.compiles == 0
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": "top_left"},
        {"score_mod": lambda s, b, h, q_idx, kv_idx: jnp.sin(s)},
        {"mask_mod": fkl_jax.SlidingWindow(None, 3)},
        {"sinks": np.zeros(N, np.float32)},
        {"bias": np.zeros((1, 1, T, S), np.float32)},
        {"kv_seq_lengths": np.zeros(B, np.int32)},
        {"deterministic": True},
        {"return_lse": True},
    ],
    ids=lambda c: next(iter(c)),
)
def test_new_kinds_give_their_own_result(change, backend):
    """No two kinds share a compiled program by mistake."""
    qkv = _qkv()
    plain = fkl_jax.attention(*qkv, implementation=backend)
    changed = fkl_jax.attention(*qkv, implementation=backend, **change)
    again = fkl_jax.attention(*qkv, implementation=backend)
    np.testing.assert_array_equal(plain, again)
    if "return_lse" in change:
        np.testing.assert_array_equal(changed[0], plain)
    elif "deterministic" not in change and "bias" not in change:
        assert not np.allclose(changed, plain)
