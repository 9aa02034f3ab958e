"""Score and mask mods with a numpy twin, shared by tests, benchmarks and docs.

A score entry is the mod (`build`, from arrays) and, independently, its formula in
numpy (`loads`: which elements of which parameter it reads; `value`: what it computes
from them).  A mask entry is the mod and the dense array it means.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import fkl_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    batch: int  # flattened
    num_q_heads: int
    q_seq_len: int
    kv_seq_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreEntry:
    name: str
    make_params: Callable[[np.random.Generator, Sizes], tuple[np.ndarray, ...]]
    build: Callable[..., Any]
    value: Callable[..., np.ndarray]
    loads: Callable[..., Any] = lambda mod, b, h, q, kv: [
        (n, ()) for n in range(len(mod.params))
    ]
    # The primitive that no program has, if any: compiled backends must refuse.
    refused: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskEntry:
    name: str
    make_params: Callable[[np.random.Generator, Sizes], tuple[np.ndarray, ...]]
    build: Callable[..., Any]
    dense: Callable[..., np.ndarray]


def _normal(rng, *shape, dtype=np.float32):
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def _positive(rng, *shape):
    return np.asarray(rng.uniform(0.5, 2.0, shape)).astype(np.float32)


def _no_params(rng, sizes):
    return ()


def _clip(index, size):
    return np.clip(index, 0, size - 1)


def _wrap(index, size):
    """Return what jnp indexing makes of an index: negative from the end, clamped."""
    return _clip(np.where(index < 0, index + size, index), size)


# ---------------------------------------------------------------------- score mods


def _relative_loads(mod, b, h, q, kv):
    radius = (mod.params[0].shape[-1] - 1) // 2
    column = np.clip(kv - q, -radius, radius) + radius
    return [(0, (h, column) if mod.params[0].ndim == 2 else (column,))]


def _captured(function):
    """Return a build function for `function(params)` -> Python function on scalars."""
    return lambda *params: function(*params)


def _alibi_soft_cap(slopes, cap):
    def mod(s, b, h, q_idx, kv_idx):
        return cap * jnp.tanh((s - slopes[h] * (q_idx - kv_idx)) / cap)

    return mod


def _many_operations(a):
    def mod(s, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).astype(jnp.float32)
        near = jnp.exp(-0.01 * distance**2) + jnp.log1p(distance * distance)
        wave = jnp.sin(0.1 * distance) * jax.nn.sigmoid(a * s)
        return s * jax.lax.rsqrt(1.0 + near) + wave + jnp.sqrt(2.0 + s**2)

    return mod


def _many_operations_twin(s, b, h, q, kv, a):
    d = (q - kv).astype(s.real.dtype)
    near = np.exp(-0.01 * d**2) + np.log1p(d * d)
    wave = np.sin(0.1 * d) / (1 + np.exp(-a * s))
    return s / np.sqrt(1 + near) + wave + np.sqrt(2 + s * s)


def _branches(a):
    def mod(s, b, h, q_idx, kv_idx):
        s = jnp.where(q_idx > kv_idx, s * a, s - a)
        # A branch with a residual, which the derivative carries out of it.
        return jax.lax.cond(h % 2 == 0, lambda x: 0.5 * x * x, lambda x: -x, s)

    return mod


def _branches_twin(s, b, h, q, kv, a):
    s = np.where(q > kv, s * a, s - a)
    return np.where(h % 2 == 0, 0.5 * s * s, -s)


def _leaky(s, b, h, q_idx, kv_idx):
    return jnp.where(s > 0, s, 0.1 * s) + jnp.maximum(s, -0.5) + jnp.abs(s)


def _leaky_twin(s, b, h, q, kv):
    negative = s.real < 0
    return (
        np.where(negative, 0.1 * s, s)
        + np.where(s.real > -0.5, s, -0.5)
        + np.where(negative, -s, s)
    )


def _loop(a):
    def mod(s, b, h, q_idx, kv_idx):
        return jax.lax.fori_loop(0, 3, lambda i, x: x + a * jnp.tanh(x), s)

    return mod


def _loop_twin(s, b, h, q, kv, a):
    for _ in range(3):
        s = s + a * np.tanh(s)
    return s


SCORE_MODS = {
    e.name: e
    for e in [
        ScoreEntry(
            name="soft_cap",
            make_params=lambda rng, z: (np.asarray(1.5, np.float32),),
            build=fkl_jax.SoftCap,
            value=lambda s, b, h, q, kv, cap: cap * np.tanh(s / cap),
        ),
        *(
            ScoreEntry(
                name=f"soft_cap_{cap}",
                make_params=lambda rng, z: (),
                build=lambda cap=cap: fkl_jax.SoftCap(float(cap)),
                value=lambda s, b, h, q, kv, cap=cap: cap * np.tanh(s / cap),
            )
            for cap in (20, 50)
        ),
        ScoreEntry(
            name="alibi",
            make_params=lambda rng, z: (_normal(rng, z.num_q_heads) / 8,),
            build=fkl_jax.ALiBi,
            value=lambda s, b, h, q, kv, slope: s - slope * (q - kv),
            loads=lambda mod, b, h, q, kv: [(0, (h,))],
        ),
        ScoreEntry(
            name="alibi_one_slope",
            make_params=lambda rng, z: (np.asarray(0.0625, np.float32),),
            build=fkl_jax.ALiBi,
            value=lambda s, b, h, q, kv, slope: s - slope * (q - kv),
        ),
        ScoreEntry(
            name="relative_bias",
            make_params=lambda rng, z: (_normal(rng, z.num_q_heads, 9),),
            build=fkl_jax.RelativeBias,
            value=lambda s, b, h, q, kv, t: s + t,
            loads=_relative_loads,
        ),
        ScoreEntry(
            name="relative_bias_one_table",
            make_params=lambda rng, z: (_normal(rng, 7),),
            build=fkl_jax.RelativeBias,
            value=lambda s, b, h, q, kv, t: s + t,
            loads=_relative_loads,
        ),
        ScoreEntry(
            name="temperature",
            make_params=lambda rng, z: (np.asarray(1.75, np.float32),),
            build=fkl_jax.Temperature,
            value=lambda s, b, h, q, kv, t: s / t,
        ),
        ScoreEntry(
            name="own_score_mod",
            make_params=lambda rng, z: (
                _normal(rng, z.batch, z.num_q_heads),
                _positive(rng),
            ),
            build=lambda gate, rate: fkl_jax.ScoreMod(
                lambda s, b, h, q_idx, kv_idx, gate, rate: (
                    s + gate[b, h] * jnp.sin(rate * (q_idx - kv_idx))
                ),
                gate,
                rate,
            ),
            value=lambda s, b, h, q, kv, gate, rate: s + gate * np.sin(rate * (q - kv)),
            loads=lambda mod, b, h, q, kv: [(0, (b, h)), (1, ())],
        ),
        ScoreEntry(
            name="alibi_soft_cap_function",
            make_params=lambda rng, z: (
                _normal(rng, z.num_q_heads) / 8,
                np.asarray(2.0, np.float32),
            ),
            build=_captured(_alibi_soft_cap),
            value=lambda s, b, h, q, kv, slope, cap: (
                cap * np.tanh((s - slope * (q - kv)) / cap)
            ),
            loads=lambda mod, b, h, q, kv: [(0, (h,)), (1, ())],
        ),
        ScoreEntry(
            name="captured_scalar",
            make_params=lambda rng, z: (_positive(rng),),
            build=_captured(lambda a: lambda s, b, h, q_idx, kv_idx: a * s + a),
            value=lambda s, b, h, q, kv, a: a * s + a,
        ),
        ScoreEntry(
            name="captured_vector",
            make_params=lambda rng, z: (_normal(rng, z.kv_seq_len + 1),),
            build=_captured(lambda a: lambda s, b, h, q_idx, kv_idx: s + a[kv_idx]),
            value=lambda s, b, h, q, kv, a: s + a,
            loads=lambda mod, b, h, q, kv: [(0, (_wrap(kv, mod.params[0].size),))],
        ),
        ScoreEntry(
            name="captured_table",
            make_params=lambda rng, z: (_normal(rng, z.num_q_heads, 5),),
            build=_captured(
                # A negative column counts from the end, as everywhere in jnp.
                lambda a: lambda s, b, h, q_idx, kv_idx: s * a[h, (kv_idx % 3) - 2]
            ),
            value=lambda s, b, h, q, kv, a: s * a,
            loads=lambda mod, b, h, q, kv: [(0, (h, (kv % 3 - 2) % 5))],
        ),
        ScoreEntry(
            name="captured_half_table",
            make_params=lambda rng, z: (
                _normal(rng, z.batch, z.num_q_heads, dtype=ml_dtypes.bfloat16),
            ),
            build=_captured(lambda a: lambda s, b, h, q_idx, kv_idx: s + a[b, h] * s),
            value=lambda s, b, h, q, kv, a: s + a * s,
            loads=lambda mod, b, h, q, kv: [(0, (b, h))],
        ),
        ScoreEntry(
            name="captured_full_bias",
            make_params=lambda rng, z: (
                _normal(rng, z.batch, z.num_q_heads, z.q_seq_len + 1, z.kv_seq_len + 1),
            ),
            build=_captured(
                lambda a: lambda s, b, h, q_idx, kv_idx: s + a[b, h, q_idx, kv_idx]
            ),
            value=lambda s, b, h, q, kv, a: s + a,
            loads=lambda mod, b, h, q, kv: [
                (
                    0,
                    (
                        b,
                        h,
                        _wrap(q, mod.params[0].shape[2]),
                        _wrap(kv, mod.params[0].shape[3]),
                    ),
                )
            ],
        ),
        ScoreEntry(
            name="read_twice",
            make_params=lambda rng, z: (_normal(rng, z.kv_seq_len + 1),),
            build=_captured(
                lambda a: (
                    lambda s, b, h, q_idx, kv_idx: (
                        s + a[kv_idx] * a[q_idx // 2] + a[kv_idx] * 1.0
                    )
                )
            ),
            value=lambda s, b, h, q, kv, at_kv, at_q: s + at_kv * at_q + at_kv,
            loads=lambda mod, b, h, q, kv: [
                (0, (_wrap(kv, mod.params[0].size),)),
                # int division truncates towards minus infinity in jnp and numpy
                (0, (_wrap(q // 2, mod.params[0].size),)),
            ],
        ),
        ScoreEntry(
            name="many_operations",
            make_params=lambda rng, z: (_positive(rng),),
            build=_captured(_many_operations),
            value=_many_operations_twin,
        ),
        ScoreEntry(
            name="branches",
            make_params=lambda rng, z: (_positive(rng),),
            build=_captured(_branches),
            value=_branches_twin,
        ),
        ScoreEntry(
            name="loop",
            make_params=lambda rng, z: (_positive(rng) / 4,),
            build=_captured(_loop),
            refused="scan",
            value=_loop_twin,
        ),
        ScoreEntry(
            name="leaky",
            make_params=_no_params,
            build=lambda: _leaky,
            value=_leaky_twin,
        ),
    ]
}


# ----------------------------------------------------------------------- mask mods


def _segments(rng, batch, length, low=-1):
    return np.sort(rng.integers(low, 4, (batch, length)), axis=-1).astype(np.int32)


def _segment_dense(b, h, q, kv, q_ids, kv_ids):
    # Offsets can lead outside the arrays; loads clamp.
    a = q_ids[b, _clip(q, q_ids.shape[1])]
    c = kv_ids[b, _clip(kv, kv_ids.shape[1])]
    return (a == c) & (a >= 0)


def _window(b, h, q, kv, left, right):
    live = np.asarray(True)
    if left is not None:
        live = live & (q - left <= kv)
    if right is not None:
        live = live & (kv <= q + right)
    return live


def _dense_at(b, h, q, kv, mask):
    q, kv = _clip(q, mask.shape[-2]), _clip(kv, mask.shape[-1])
    if mask.ndim == 2:
        return mask[q, kv]
    return mask[b % mask.shape[0], h % mask.shape[1], q, kv]


def _int(value):
    return np.asarray(value, np.int32)


MASK_MODS = {
    e.name: e
    for e in [
        MaskEntry(
            name="causal",
            make_params=_no_params,
            build=lambda: fkl_jax.Causal(),
            dense=lambda b, h, q, kv: kv <= q,
        ),
        MaskEntry(
            name="window",
            make_params=lambda rng, z: (_int(4), _int(2)),
            build=lambda left, right: fkl_jax.SlidingWindow(left, right),
            dense=_window,
        ),
        MaskEntry(
            name="window_last",
            make_params=lambda rng, z: (_int(3),),
            build=lambda w: fkl_jax.SlidingWindow.last(w),
            dense=lambda b, h, q, kv, w: _window(b, h, q, kv, w - 1, 0),
        ),
        MaskEntry(
            name="window_left_only",
            make_params=lambda rng, z: (_int(3),),
            build=lambda left: fkl_jax.SlidingWindow(left, None),
            dense=lambda b, h, q, kv, left: _window(b, h, q, kv, left, None),
        ),
        MaskEntry(
            name="window_right_only",
            make_params=lambda rng, z: (_int(3),),
            build=lambda right: fkl_jax.SlidingWindow(None, right),
            dense=lambda b, h, q, kv, right: _window(b, h, q, kv, None, right),
        ),
        MaskEntry(
            name="prefix_lm",
            make_params=lambda rng, z: (_int(4),),
            build=lambda length: fkl_jax.PrefixLM(length),
            dense=lambda b, h, q, kv, length: (kv < length) | (kv <= q),
        ),
        MaskEntry(
            name="prefix_lm_per_batch",
            make_params=lambda rng, z: (
                rng.integers(0, z.kv_seq_len + 1, z.batch).astype(np.int32),
            ),
            build=lambda length: fkl_jax.PrefixLM(length),
            dense=lambda b, h, q, kv, length: (kv < length[b]) | (kv <= q),
        ),
        MaskEntry(
            name="segment_ids",
            make_params=lambda rng, z: (
                _segments(rng, z.batch, z.q_seq_len),
                _segments(rng, z.batch, z.kv_seq_len),
            ),
            build=lambda q_ids, kv_ids: fkl_jax.SegmentIds(q_ids, kv_ids),
            dense=_segment_dense,
        ),
        MaskEntry(
            name="padding",
            make_params=lambda rng, z: (
                rng.integers(0, z.kv_seq_len + 1, z.batch).astype(np.int32),
            ),
            build=lambda lengths: fkl_jax.Padding(lengths),
            dense=lambda b, h, q, kv, lengths: kv < lengths[b],
        ),
        MaskEntry(
            name="dense_2d",
            make_params=lambda rng, z: (rng.random((z.q_seq_len, z.kv_seq_len)) < 0.6,),
            build=lambda mask: fkl_jax.DenseMask(mask),
            dense=_dense_at,
        ),
        MaskEntry(
            name="dense_4d",
            make_params=lambda rng, z: (
                rng.random((z.batch, z.num_q_heads, z.q_seq_len, z.kv_seq_len)) < 0.6,
            ),
            build=lambda mask: fkl_jax.DenseMask(mask),
            dense=_dense_at,
        ),
        MaskEntry(
            name="dense_one_head",
            make_params=lambda rng, z: (
                rng.random((z.batch, 1, z.q_seq_len, z.kv_seq_len)) < 0.6,
            ),
            build=lambda mask: fkl_jax.DenseMask(mask),
            dense=_dense_at,
        ),
        MaskEntry(
            name="dense_of_keys",
            make_params=lambda rng, z: (
                rng.random((z.batch, 1, 1, z.kv_seq_len)) < 0.6,
            ),
            build=lambda mask: fkl_jax.DenseMask(mask),
            dense=_dense_at,
        ),
        MaskEntry(
            name="causal_or_prefix",
            make_params=lambda rng, z: (_int(3),),
            build=lambda w: fkl_jax.Causal() | fkl_jax.SlidingWindow(None, w),
            dense=lambda b, h, q, kv, w: (kv <= q) | (kv <= q + w),
        ),
        MaskEntry(
            name="causal_and_not_window",
            make_params=lambda rng, z: (_int(2),),
            build=lambda w: fkl_jax.Causal() & ~fkl_jax.SlidingWindow(w, w),
            dense=lambda b, h, q, kv, w: (kv <= q) & ~_window(b, h, q, kv, w, w),
        ),
        MaskEntry(
            name="own_mask_mod",
            make_params=lambda rng, z: (_int(3),),
            build=lambda n: fkl_jax.MaskMod(
                lambda b, h, q_idx, kv_idx, n: (q_idx - kv_idx) % n == 0, n
            ),
            dense=lambda b, h, q, kv, n: (q - kv) % n == 0,
        ),
        MaskEntry(
            name="per_head_function",
            make_params=_no_params,
            build=lambda: lambda b, h, q_idx, kv_idx: (h % 2 == 0) | (kv_idx <= q_idx),
            dense=lambda b, h, q, kv: (h % 2 == 0) | (kv <= q),
        ),
        MaskEntry(
            name="captured_threshold",
            make_params=lambda rng, z: (_normal(rng, z.num_q_heads, z.kv_seq_len),),
            build=lambda table: lambda b, h, q_idx, kv_idx: table[h, kv_idx] > -0.5,
            dense=lambda b, h, q, kv, table: table[h, _wrap(kv, table.shape[1])] > -0.5,
        ),
        MaskEntry(
            name="kill_rows",
            make_params=lambda rng, z: (_int(3),),
            build=lambda n: lambda b, h, q_idx, kv_idx: q_idx % n != 0,
            dense=lambda b, h, q, kv, n: q % n != 0,
        ),
        MaskEntry(
            name="nothing",
            make_params=_no_params,
            build=lambda: lambda b, h, q_idx, kv_idx: kv_idx < kv_idx,
            dense=lambda b, h, q, kv: kv < kv,
        ),
    ]
}
