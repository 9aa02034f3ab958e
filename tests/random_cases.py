"""Random configurations for a GPU, in sets that share their kernels.

Compiling kernels is nearly all the time that a configuration takes there. What the
kernels of a call depend on - its features, and sizes as powers of two - is drawn once
per set; the exact sizes, head dims and all values are drawn for each of its members.
"""

import dataclasses
import math

import catalogue
import numpy as np
from cases import Case, sizes

from fkl_jax._tuning import anchored

HEAD_DIMS = (1, 8, 17, 33, 40, 48, 56, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 256)
MAX_SCORES = 1 << 21  # of a configuration; the oracle is dense
_MASKS_AS_SCORE = ("causal", "window", "dense_4d")


def draw_features(rng: np.random.Generator) -> Case:
    """The first member of a set."""

    def pick(*choices):
        return choices[rng.integers(len(choices))]

    def some(names, most):
        names = sorted(names)
        count = max(0, int(rng.integers(-1, most + 1)))
        return tuple(names[i] for i in rng.integers(len(names), size=count))

    # Few rows go to the decoding kernel, more than 64 with their group to a tiled one.
    q_seq_len = int(pick(*[rng.integers(65, 400)] * 3, rng.integers(1, 9), 1, 40))
    kv_seq_len = int(pick(rng.integers(1, 65), *[rng.integers(65, 500)] * 3))
    if q_seq_len <= 8:
        kv_seq_len = int(pick(kv_seq_len, rng.integers(500, 3000)))
    offsets = pick(None, None, None, "scalar", "batch")
    causal = pick(False, True, "top_left", "bottom_right")
    if offsets and causal in ("top_left", "bottom_right"):
        causal = True
    if causal is True and not offsets:
        kv_seq_len = q_seq_len
    num_kv_heads = pick(1, 1, 2, 3)
    num_q_heads = num_kv_heads * pick(1, 1, 2, 3, 4)
    batch = pick((), (1,), (2,), (3,), (2, 2))
    while math.prod(batch) * num_q_heads * q_seq_len * kv_seq_len > MAX_SCORES:
        num_q_heads, num_kv_heads, batch = num_kv_heads, 1, batch[:1]
        q_seq_len = -(-q_seq_len // 2)
        kv_seq_len = q_seq_len if causal is True and not offsets else kv_seq_len
        num_q_heads = max(num_q_heads, 1)
    dtype = pick("bfloat16", "bfloat16", "float16", "float32")
    head_dim = pick(*HEAD_DIMS)
    bias = pick(None, None, None, None, "-", "BNTS", "NTS", "TS", "NS", "B")
    score_mods = some(
        [n for n, e in catalogue.SCORE_MODS.items() if e.refused is None], 2
    )
    scale = pick(None, None, None, -0.4, 0.25)
    return Case(
        batch=batch,
        q_seq_len=q_seq_len,
        kv_seq_len=kv_seq_len,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim if rng.random() < 0.7 else pick(*HEAD_DIMS),
        dtype=dtype,
        causal=causal,
        scale=scale,
        traced_scale=scale is not None and bool(pick(False, True)),
        bias=bias,
        bias_dtype=pick("float32", dtype),
        score_mods=score_mods,
        mask_mods=some(catalogue.MASK_MODS, 2),
        mask_as_score=(pick(*_MASKS_AS_SCORE),) if rng.random() < 0.1 else (),
        block_mask=pick(*[None] * 6, "holes", "per_head", "one_head", "causal", "dead"),
        segment_ids=pick(False, False, True),
        lengths=pick("", "", "q", "k", "qk"),
        offsets=offsets,
        sinks=pick(False, False, True),
        # With a bias or captured arrays the backward would run in plain JAX.
        deterministic=not bias and not score_mods and bool(pick(False, True)),
    )


def draw_member(features: Case, rng: np.random.Generator) -> Case:
    """A configuration with the kernels of `features`."""
    changes = {}
    if not _captures_have_sizes(features):
        changes |= _draw_sizes(features, rng)
    changes |= _draw_head_dims(features, rng)
    return dataclasses.replace(
        features,
        **changes,
        block_q=int(rng.choice([1, 3, 16, 64, 100, 128])),
        block_kv=int(rng.choice([1, 5, 16, 64, 100, 128])),
        poison=bool(rng.random() < 0.5),
        cotangents=str(rng.choice(["both", "both", "out", "lse"])),
        seed=int(rng.integers(1 << 16)),
    )


def draw_set(seed: int, count: int) -> list[Case]:
    """`count` configurations that share their kernels."""
    rng = np.random.default_rng(seed)
    features = draw_features(rng)
    return [draw_member(features, rng) for _ in range(count)]


# --- private -------------------------------------------------------------------------


def _captures_have_sizes(case: Case) -> bool:
    """True if a mod reads an array: its shape is part of the program."""
    entries = [catalogue.SCORE_MODS[n] for n in case.score_mods]
    entries += [catalogue.MASK_MODS[n] for n in (*case.mask_mods, *case.mask_as_score)]
    rng = np.random.default_rng(0)
    return any(
        np.ndim(x) for entry in entries for x in entry.make_params(rng, sizes(case))
    )


def _draw_sizes(case: Case, rng: np.random.Generator) -> dict:
    """Sizes with the powers of two of `case`."""

    def near(size):
        return int(rng.integers(anchored(size) // 2 + 1, anchored(size) + 1))

    q_seq_len, kv_seq_len = near(case.q_seq_len), near(case.kv_seq_len)
    if case.q_seq_len == case.kv_seq_len:
        kv_seq_len = q_seq_len
    changed = dataclasses.replace(case, q_seq_len=q_seq_len, kv_seq_len=kv_seq_len)
    heads = anchored(math.prod(case.batch) * case.num_q_heads)
    group = case.num_q_heads // case.num_kv_heads
    for _ in range(20):
        new_group = int(rng.integers(anchored(group) // 2 + 1, anchored(group) + 1))
        new_kv_heads = int(rng.integers(1, 5))
        batch = tuple(int(n) for n in rng.integers(1, 4, len(case.batch)))
        new_heads = math.prod(batch) * new_group * new_kv_heads
        fits = new_heads * q_seq_len * kv_seq_len <= 2 * MAX_SCORES
        if anchored(new_heads) == heads and fits:
            changed = dataclasses.replace(
                changed,
                batch=batch,
                num_kv_heads=new_kv_heads,
                num_q_heads=new_kv_heads * new_group,
            )
            break
    names = ("batch", "q_seq_len", "kv_seq_len", "num_q_heads", "num_kv_heads")
    return {name: getattr(changed, name) for name in names}


def _draw_head_dims(case: Case, rng: np.random.Generator) -> dict:
    """Head dims that are padded alike; rows of 16 bytes stay so, others too."""
    step = 4 if case.dtype == "float32" else 8

    def near(dim):
        last = -(-dim // 16) * 16
        every = np.arange(last - 15, last + 1)
        return int(rng.choice(every[(every % step == 0) == (dim % step == 0)]))

    equal = case.head_dim == case.value_head_dim
    head_dim = near(case.head_dim)
    value_head_dim = head_dim if equal else near(case.value_head_dim)
    return {"head_dim": head_dim, "value_head_dim": value_head_dim}
