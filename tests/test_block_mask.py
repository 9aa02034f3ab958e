"""BlockMask: its builders against the dense mask, its shapes, repr and pytree."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax
from fkl_jax import BlockMask

SIZES = [(1, 1), (12, 12), (13, 29), (29, 13), (64, 64), (5, 200)]
BLOCKS = [(1, 1), (4, 8), (8, 4), (7, 5), (128, 128), (13, 3)]


def _blocks(dense: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """Return which blocks of dense (..., T, S) hold a live element."""
    t, s = dense.shape[-2:]
    rows, cols = -(-t // block_q), -(-s // block_kv)
    padded = np.zeros((*dense.shape[:-2], rows * block_q, cols * block_kv), bool)
    padded[..., :t, :s] = dense
    split = padded.reshape(*dense.shape[:-2], rows, block_q, cols, block_kv)
    return split.any((-3, -1))


def _expand(blocks: np.ndarray, block_q: int, block_kv: int, t: int, s: int):
    dense = np.repeat(np.repeat(blocks, block_q, -2), block_kv, -1)
    return dense[..., :t, :s]


def _check(block_mask, dense, block_q, block_kv):
    """Hold the mask to `dense` (B|1, N|1, T, S), coarsened to blocks."""
    t, s = dense.shape[-2:]
    blocks = _blocks(dense, block_q, block_kv)
    assert block_mask.block_q == block_q and block_mask.block_kv == block_kv
    assert block_mask.mask.dtype in (jnp.bool_, jnp.uint8)
    got = np.asarray(block_mask.mask) != 0
    assert got.ndim in (3, 4)
    np.testing.assert_array_equal(got.reshape(blocks.shape), blocks)
    got_dense = np.asarray(block_mask.to_dense(t, s))
    assert got_dense.dtype == bool
    np.testing.assert_array_equal(
        got_dense.reshape(dense.shape), _expand(blocks, block_q, block_kv, t, s)
    )
    np.testing.assert_allclose(float(block_mask.sparsity()), 1 - blocks.mean())


@pytest.mark.parametrize("t,s", SIZES)
@pytest.mark.parametrize("block_q,block_kv", BLOCKS)
def test_causal(t, s, block_q, block_kv):
    dense = np.tri(t, s, dtype=bool)[None, None]
    _check(
        BlockMask.causal(t, s, block_q=block_q, block_kv=block_kv),
        dense, block_q, block_kv,
    )  # fmt: skip


@pytest.mark.parametrize("t,s", SIZES)
@pytest.mark.parametrize("block_q,block_kv", BLOCKS)
@pytest.mark.parametrize("left,right", [(3, 0), (0, 0), (5, 9), (1000, 2)])
def test_sliding_window(t, s, block_q, block_kv, left, right):
    i, j = np.arange(t)[:, None], np.arange(s)
    dense = ((i - left <= j) & (j <= i + right))[None, None]
    _check(
        BlockMask.sliding_window(
            t, s, left, right, block_q=block_q, block_kv=block_kv
        ),
        dense, block_q, block_kv,
    )  # fmt: skip


@pytest.mark.parametrize("left,right", [(None, 3), (3, None), (None, None)])
def test_sliding_window_unbounded(left, right):
    i, j = np.arange(20)[:, None], np.arange(30)
    dense = np.ones((20, 30), bool)
    if left is not None:
        dense &= i - left <= j
    if right is not None:
        dense &= j <= i + right
    mask = BlockMask.sliding_window(20, 30, left, right, block_q=4, block_kv=8)
    _check(mask, dense[None, None], 4, 8)


@pytest.mark.parametrize("block_q,block_kv", [(4, 8), (7, 5), (128, 128)])
def test_from_mask_mod(block_q, block_kv):
    batch, heads, t, s = 2, 3, 21, 34

    def mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx + 5 * b) & ((kv_idx // 8 + h) % 2 == 0)

    b, h, i, j = np.ix_(range(batch), range(heads), range(t), range(s))
    dense = (j <= i + 5 * b) & ((j // 8 + h) % 2 == 0)
    mask = BlockMask.from_mask_mod(
        mod, t, s, batch=batch, heads=heads, block_q=block_q, block_kv=block_kv
    )
    _check(mask, dense, block_q, block_kv)


@pytest.mark.parametrize(
    "mod",
    [
        fkl_jax.Causal(),
        fkl_jax.SlidingWindow(3),
        fkl_jax.Causal() & ~fkl_jax.SlidingWindow(2),
        fkl_jax.PrefixLM(5) | fkl_jax.SlidingWindow(0, 2),
    ],
    ids=["causal", "window", "not", "or"],
)
def test_from_built_in_mask_mods(mod):
    t, s = 19, 26
    i, j = np.arange(t)[:, None], np.arange(s)
    dense = np.asarray(
        jax.vmap(lambda i: jax.vmap(lambda j: mod(0, 0, i, j))(jnp.arange(s)))(
            jnp.arange(t)
        )
    )
    if isinstance(mod, fkl_jax.Causal):
        np.testing.assert_array_equal(dense, j <= i)
    mask = BlockMask.from_mask_mod(mod, t, s, block_q=4, block_kv=8)
    _check(mask, dense[None, None], 4, 8)


@pytest.mark.parametrize("block_q,block_kv", [(1, 1), (4, 8), (7, 5), (64, 64)])
@pytest.mark.parametrize("ordered", [True, False])
def test_from_segment_ids(block_q, block_kv, ordered):
    """A block may be kept without need (ids are compared by range), never lost."""
    rng = np.random.default_rng(0)
    q_ids, kv_ids = rng.integers(-1, 4, (2, 21)), rng.integers(-1, 4, (2, 34))
    if ordered:
        q_ids, kv_ids = np.sort(q_ids), np.sort(kv_ids)
    dense = (q_ids[:, None, :, None] == kv_ids[:, None, None, :]) & (
        q_ids[:, None, :, None] >= 0
    )
    mask = BlockMask.from_segment_ids(
        jnp.asarray(q_ids, jnp.int32), jnp.asarray(kv_ids, jnp.int32),
        block_q=block_q, block_kv=block_kv,
    )  # fmt: skip
    got = np.asarray(mask.mask).reshape(2, 1, *mask.mask.shape[-2:]) != 0
    blocks = _blocks(dense, block_q, block_kv)
    assert not (blocks & ~got).any()
    if ordered or block_q == 1:
        assert (got & ~blocks).mean() <= 0.1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_from_segment_ids_pads_with_no_segment(dtype):
    """The padding of unsigned ids must not become a segment of its own."""
    q_ids, kv_ids = np.asarray([[0, 0, 0, 0, 1]], dtype), np.asarray([[2, 2, 2]], dtype)
    mask = BlockMask.from_segment_ids(q_ids, kv_ids, block_q=4, block_kv=4)
    assert not np.asarray(mask.mask).any()


@pytest.mark.parametrize("block_q,block_kv", [(4, 8), (7, 5), (128, 128)])
@pytest.mark.parametrize("lead", [(), (1, 1), (2, 1), (1, 3), (2, 3)])
def test_from_dense(block_q, block_kv, lead):
    dense = np.random.default_rng(0).random((*lead, 21, 34)) < 0.05
    mask = BlockMask.from_dense(jnp.asarray(dense), block_q=block_q, block_kv=block_kv)
    _check(mask, dense.reshape(*(lead or (1, 1)), 21, 34), block_q, block_kv)


def test_builders_in_jit():
    """Contents are traced: a builder inside jit follows its arguments."""

    @jax.jit
    def blocks(window, ids):
        return (
            BlockMask.sliding_window(20, 30, window, block_q=4, block_kv=8).mask,
            BlockMask.from_segment_ids(ids, ids, block_q=4, block_kv=4).mask,
        )

    ids = jnp.repeat(jnp.arange(5), 4)[None]
    window, segments = blocks(6, ids)
    want = BlockMask.sliding_window(20, 30, 6, block_q=4, block_kv=8).mask
    np.testing.assert_array_equal(window, want)
    np.testing.assert_array_equal(np.squeeze(segments) != 0, np.eye(5, dtype=bool))


def _largest_array(jaxpr) -> int:
    """Return the number of elements of the largest array that a jaxpr makes."""
    largest = 0
    for eqn in jaxpr.eqns:
        sizes = [math.prod(v.aval.shape) for v in eqn.outvars if v.aval.shape]
        inner = [
            _largest_array(getattr(x, "jaxpr", x))
            for x in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            )
            if hasattr(getattr(x, "jaxpr", x), "eqns")
        ]
        largest = max([largest, *sizes, *inner])
    return largest


@pytest.mark.parametrize(
    "build",
    [
        lambda n, ids: BlockMask.causal(n, n),
        lambda n, ids: BlockMask.sliding_window(n, n, 4095),
        lambda n, ids: BlockMask.from_mask_mod(fkl_jax.PrefixLM(100), n, n),
        lambda n, ids: BlockMask.from_segment_ids(ids, ids),
    ],
    ids=["causal", "sliding_window", "from_mask_mod", "from_segment_ids"],
)
def test_builders_make_no_dense_array(build):
    n = 1 << 15
    ids = jax.ShapeDtypeStruct((1, n), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda ids: build(n, ids).mask)(ids).jaxpr
    assert (n // 128) ** 2 <= _largest_array(jaxpr) <= n * n // 1000


def test_causal_block_mask_is_coarse(backend):
    """Every element of an attended block is live unless another source says no."""
    key = jax.random.key(0)
    q = k = v = jax.random.normal(key, (1, 20, 2, 8))
    mask = BlockMask.causal(20, 20, block_q=4, block_kv=4)
    coarse = fkl_jax.attention(q, k, v, block_mask=mask, implementation=backend)
    dense = fkl_jax.DenseMask(mask.to_dense(20, 20).reshape(20, 20))
    want = fkl_jax.attention(q, k, v, mask_mod=dense, implementation=backend)
    np.testing.assert_allclose(coarse, want, rtol=1e-5, atol=1e-6)
    both = fkl_jax.attention(
        q, k, v, block_mask=mask, causal=True, implementation=backend
    )
    want = fkl_jax.attention(q, k, v, causal=True, implementation=backend)
    np.testing.assert_allclose(both, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [1, 2, 255])
def test_any_non_zero_byte_attends(value, backend):
    q = k = v = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    blocks = np.asarray([[1, 0, 1], [0, 1, 1], [1, 1, 0]])
    outs = [
        fkl_jax.attention(
            q, k, v, implementation=backend,
            block_mask=BlockMask(jnp.asarray(x[None, None]), block_q=4, block_kv=4),
        )
        for x in (blocks.astype(bool), (value * blocks).astype(np.uint8))
    ]  # fmt: skip
    np.testing.assert_array_equal(*outs)


def test_flat_and_four_dimensional_masks_agree(backend):
    q = k = v = jax.random.normal(jax.random.key(0), (2, 9, 3, 8))
    blocks = jnp.asarray(np.random.default_rng(0).random((2, 3, 3, 2)) < 0.6)
    outs = [
        fkl_jax.attention(
            q, k, v, implementation=backend,
            block_mask=BlockMask(x, block_q=4, block_kv=8),
        )
        for x in (blocks, blocks.reshape(6, 3, 2))
    ]  # fmt: skip
    np.testing.assert_array_equal(*outs)


def test_pytree():
    """The array is the only leaf, the sizes are static."""
    mask = BlockMask.causal(20, 30, block_q=4, block_kv=8)
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == 1
    other = BlockMask.causal(20, 30, block_q=4, block_kv=8)
    assert jax.tree.structure(other) == structure
    sized = BlockMask.causal(20, 30, block_q=8, block_kv=8)
    assert jax.tree.structure(sized) != structure
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert (rebuilt.block_q, rebuilt.block_kv) == (4, 8)
    jax.tree.map(lambda x: None, mask)  # leaves may be anything in a tree_map
    jax.jit(lambda m: m)(mask)


def test_repr():
    """Says the sizes and how much is skipped, and never fails, traced or not."""
    mask = BlockMask.causal(16, 16, block_q=4, block_kv=8)
    text = repr(mask)
    assert "BlockMask" in text
    assert "4" in text and "8" in text
    sparse = BlockMask(
        jnp.asarray([[[1, 0, 0, 0]]], jnp.uint8), block_q=64, block_kv=32
    )
    assert "64" in repr(sparse) and "32" in repr(sparse) and "75" in repr(sparse)
    texts = []
    jax.jit(lambda m: (texts.append(repr(m)), m)[1])(mask)
    assert "BlockMask" in texts[0]
    jax.eval_shape(lambda m: m, mask)


@pytest.mark.parametrize(
    "make,kind,words",
    [
        (lambda: BlockMask.causal(-1, 4), ValueError, "q_len.*-1"),
        (lambda: BlockMask.causal(4, 4, block_q=0), ValueError, "block_q.*0"),
        (lambda: BlockMask.causal(4, 4, block_kv=-1), ValueError, "block_kv.*-1"),
        (lambda: BlockMask.causal(4, 4, block_q=1.5), TypeError, "block_q"),
        (lambda: BlockMask.sliding_window(4, 4, -1), ValueError, "left.*-1"),
        (lambda: BlockMask.sliding_window(4, 4, 1, -1), ValueError, "right.*-1"),
        (
            lambda: BlockMask.from_mask_mod(lambda b, h, q, kv: 1.0, 4, 4),
            TypeError,
            "mask_mod",
        ),
        (
            lambda: BlockMask.from_mask_mod(lambda q, kv: q < kv, 4, 4),
            (TypeError, ValueError),
            "mask_mod",
        ),
        (lambda: BlockMask.from_dense(jnp.zeros(7, bool)), ValueError, "dense.*7"),
        (lambda: BlockMask.from_dense(jnp.zeros((3, 3))), TypeError, "float32"),
        (
            lambda: BlockMask.from_segment_ids(jnp.zeros((1, 4)), jnp.zeros((1, 4))),
            TypeError,
            "float32",
        ),
    ],
)
def test_builder_error(make, kind, words):
    with pytest.raises(kind, match=f"(?s){words}"):
        make()
