"""A `Case` is one configuration of a call; here it meets oracle and backends."""

import dataclasses
import functools
import math
import warnings
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import fkl_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What to call `attention` with; the arrays follow from it and `seed`."""

    name: str = ""
    batch: tuple[int, ...] = (2,)
    q_seq_len: int = 13
    kv_seq_len: int = 13
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    value_head_dim: int = 16
    dtype: str = "float32"
    causal: bool | str = False
    scale: float | None = None
    traced_scale: bool = False
    bias: str | None = None  # which of the axes "BNTS" are full, for example "B1T1"
    bias_dtype: str = "float32"
    score_mods: tuple[str, ...] = ()
    fixed_mods: bool = False  # no gradients of the score mods' parameters
    mask_mods: tuple[str, ...] = ()
    mask_as_score: tuple[str, ...] = ()  # mask mods handed over as score_mod
    block_mask: str | None = None  # causal, holes, per_head, one_head, checker, dead
    block_q: int = 4
    block_kv: int = 8
    segment_ids: bool = False
    lengths: str = ""  # any of "q" and "k"
    offsets: str | None = None  # scalar, batch
    sinks: bool = False
    query_gain: float = 1.0
    score_shift: float | None = None  # a bias that is this everywhere
    poison: bool = False  # NaN wherever nothing may look
    cotangents: str = "both"  # both, out, lse
    deterministic: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name or repr(self)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arrays of a case: `floats` are differentiated, `others` are not."""

    case: Case
    floats: dict[str, np.ndarray]
    others: dict[str, np.ndarray]
    cotangents: tuple[np.ndarray, np.ndarray]  # dout (*B, T, N, Hv), dlse (*B, N, T)
    live: np.ndarray  # (B, N, T, S)


def sizes(case: Case) -> catalogue.Sizes:
    return catalogue.Sizes(
        batch=math.prod(case.batch),
        num_q_heads=case.num_q_heads,
        q_seq_len=case.q_seq_len,
        kv_seq_len=case.kv_seq_len,
    )


def _block_mask(case: Case, rng: np.random.Generator) -> np.ndarray:
    z = sizes(case)
    rows = -(-case.q_seq_len // case.block_q)
    cols = -(-case.kv_seq_len // case.block_kv)
    flat = (z.batch * z.num_q_heads, rows, cols)
    r, c = np.arange(rows)[:, None], np.arange(cols)
    match case.block_mask:
        case "causal":
            return np.broadcast_to(c * case.block_kv <= r * case.block_q, flat)
        case "holes":
            return rng.random(flat) < 0.5
        case "per_head":
            return rng.random((1, z.num_q_heads, rows, cols)) < 0.5
        case "one_head":
            return rng.random((z.batch, 1, rows, cols)) < 0.5
        case "checker":
            return ((r + c) % 2 == 0)[None, None]
        case "dead":
            mask = rng.random(flat) < 0.7
            mask[..., rows // 2, :] = False
            mask[..., :, cols // 2] = False
            return mask.astype(np.uint8)
    raise AssertionError(case.block_mask)


def _make_live(case: Case, others: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return live (B, N, T, S), dead rows (B, T), q_idx (B, T), kv_idx (B, S)."""
    z = sizes(case)
    batch, t, s = z.batch, case.q_seq_len, case.kv_seq_len
    i, j = np.arange(t), np.arange(s)

    def flat(name):
        return np.broadcast_to(others.get(name, 0), case.batch).reshape(batch, 1)

    q_idx, kv_idx = flat("q_offset") + i, flat("kv_offset") + j
    qi, kj = q_idx[:, None, :, None], kv_idx[:, None, None, :]
    b = np.arange(batch)[:, None, None, None]
    h = np.arange(case.num_q_heads)[None, :, None, None]
    live = np.ones((batch, case.num_q_heads, t, s), bool)
    match case.causal:
        case True:
            live &= kj <= qi
        case "top_left":
            live &= j <= i[:, None]
        case "bottom_right":
            live &= j <= i[:, None] + s - t
    for kind in ("mask", "as_score"):
        names = case.mask_mods if kind == "mask" else case.mask_as_score
        for n, name in enumerate(names):
            params = [others[k] for k in _keys(others, f"{kind}.{n}.")]
            live &= catalogue.MASK_MODS[name].dense(b, h, qi, kj, *params)
    if case.block_mask:
        blocks = others["block_mask"] != 0
        if blocks.ndim == 3:
            blocks = blocks.reshape(batch, case.num_q_heads, *blocks.shape[1:])
        live &= blocks[..., i[:, None] // case.block_q, j // case.block_kv]
    if case.segment_ids:
        a = others["q_segment_ids"].reshape(batch, 1, t, 1)
        c = others["kv_segment_ids"].reshape(batch, 1, 1, s)
        live &= (a == c) & (a >= 0)
    dead_rows = np.zeros((batch, t), bool)
    if "q" in case.lengths:
        dead_rows = i >= flat("q_seq_lengths")
    if "k" in case.lengths:
        live &= j < flat("kv_seq_lengths")[:, None, None]
    return live & ~dead_rows[:, None, :, None], dead_rows, q_idx, kv_idx


def _keys(values: dict[str, Any], prefix: str) -> list[str]:
    """Return the names that start with `prefix`, in order of insertion."""
    return [name for name in values if name.startswith(prefix)]


@functools.lru_cache(maxsize=64)
def make_problem(case: Case) -> Problem:
    rng = np.random.default_rng(case.seed)
    z = sizes(case)
    dtype = np.dtype(case.dtype)
    t, s, n = case.q_seq_len, case.kv_seq_len, case.num_q_heads

    def normal(*shape, gain=1.0, dtype=dtype):
        return np.asarray(gain * rng.standard_normal((*case.batch, *shape)), dtype)

    floats = {
        "query": normal(t, n, case.head_dim, gain=case.query_gain),
        "key": normal(s, case.num_kv_heads, case.head_dim),
        "value": normal(s, case.num_kv_heads, case.value_head_dim),
    }
    if case.traced_scale:
        floats["scale"] = np.asarray(case.scale, np.float32)
    if case.bias or case.score_shift is not None:
        full = (*case.batch, n, t, s)
        kept = "B" * len(case.batch) + "NTS"
        shape = tuple(
            size if letter in (case.bias or "") else 1
            for size, letter in zip(full, kept, strict=True)
        )
        bias = rng.standard_normal(shape) + (case.score_shift or 0.0)
        floats["bias"] = np.asarray(bias, case.bias_dtype)
    if case.sinks:
        floats["sinks"] = np.asarray(rng.standard_normal(n), np.float32)
    for m, name in enumerate(case.score_mods):
        for p, x in enumerate(catalogue.SCORE_MODS[name].make_params(rng, z)):
            # float32 parameters are what bfloat16 and float16 calls get, too.
            floats[f"score.{m}.{p}"] = x.astype(dtype) if dtype == np.float64 else x

    others: dict[str, np.ndarray] = {}
    for kind, names in (("mask", case.mask_mods), ("as_score", case.mask_as_score)):
        for m, name in enumerate(names):
            for p, x in enumerate(catalogue.MASK_MODS[name].make_params(rng, z)):
                others[f"{kind}.{m}.{p}"] = x
    if case.block_mask:
        others["block_mask"] = _block_mask(case, rng)
    if case.segment_ids:
        for name, length in (("q_segment_ids", t), ("kv_segment_ids", s)):
            ids = rng.integers(-1, 3, (*case.batch, length))
            others[name] = np.sort(ids, axis=-1).astype(np.int32)
    for letter, name, length in (("q", "q_seq_lengths", t), ("k", "kv_seq_lengths", s)):
        if letter in case.lengths:
            lengths = rng.integers(0, length + 1, case.batch)
            others[name] = np.asarray(lengths, np.int32)
    if case.offsets:
        shape = case.batch if case.offsets == "batch" else ()
        others["q_offset"] = np.asarray(rng.integers(0, s + 1, shape), np.int32)
        others["kv_offset"] = np.asarray(rng.integers(0, t + 1, shape), np.int32)

    dout = normal(t, n, case.value_head_dim)
    dlse = normal(n, t, dtype=np.float32 if dtype != np.float64 else dtype)
    if case.cotangents == "out":
        dlse = np.zeros_like(dlse)
    if case.cotangents == "lse":
        dout = np.zeros_like(dout)
    live = _make_live(case, others)[0]
    return Problem(case, floats, others, (dout, dlse), live)


def poisoned(problem: Problem) -> dict[str, np.ndarray]:
    """Return the float operands with NaN where nothing may look."""
    case = problem.case
    floats = {k: np.array(v) for k, v in problem.floats.items()}
    group = case.num_q_heads // case.num_kv_heads
    batch, n, t, s = problem.live.shape
    used = problem.live.reshape(batch, case.num_kv_heads, group, t, s).any((2, 3))
    unused = ~np.moveaxis(used, 1, 2)  # (B, S, K)
    for name in ("key", "value"):
        x = floats[name].reshape(batch, s, case.num_kv_heads, -1)
        x[unused] = np.nan
        floats[name] = x.reshape(floats[name].shape)
    if "q" in case.lengths:
        lengths = problem.others["q_seq_lengths"].reshape(batch, 1)
        x = floats["query"].reshape(batch, t, n, -1)
        x[np.arange(t) >= lengths] = np.nan
        floats["query"] = x.reshape(floats["query"].shape)
    return floats


# ------------------------------------------------------------------------ backends


def arguments(case: Case, floats: dict, others: dict) -> dict[str, Any]:
    """Return the keyword arguments of `attention` for (traced) arrays."""
    kwargs: dict[str, Any] = {}
    mods = []
    for m, name in enumerate(case.score_mods):
        params = [floats[k] for k in _keys(floats, f"score.{m}.")]
        mods.append(catalogue.SCORE_MODS[name].build(*params))
    masks: dict[str, list] = {"mask": [], "as_score": []}
    for kind, names in (("mask", case.mask_mods), ("as_score", case.mask_as_score)):
        for m, name in enumerate(names):
            params = [others[k] for k in _keys(others, f"{kind}.{m}.")]
            masks[kind].append(catalogue.MASK_MODS[name].build(*params))
    mods += masks["as_score"]
    if mods:
        kwargs["score_mod"] = mods[0] if len(mods) == 1 else tuple(mods)
    if masks["mask"]:
        one = len(masks["mask"]) == 1
        kwargs["mask_mod"] = masks["mask"][0] if one else tuple(masks["mask"])
    if case.block_mask:
        kwargs["block_mask"] = fkl_jax.BlockMask(
            others["block_mask"], block_q=case.block_q, block_kv=case.block_kv
        )
    for name in (
        "q_segment_ids",
        "kv_segment_ids",
        "q_seq_lengths",
        "kv_seq_lengths",
        "q_offset",
        "kv_offset",
    ):
        if name in others:
            kwargs[name] = others[name]
    for name in ("bias", "sinks"):
        if name in floats:
            kwargs[name] = floats[name]
    kwargs["scale"] = floats.get("scale", case.scale)
    kwargs["causal"] = case.causal
    kwargs["deterministic"] = case.deterministic
    return kwargs


def call(case: Case, implementation: str | None, floats: dict, others: dict):
    """Return (out, lse) of a backend."""
    return fkl_jax.attention(
        floats["query"],
        floats["key"],
        floats["value"],
        **arguments(case, floats, others),
        return_lse=True,
        implementation=implementation,
    )


# Nearly all the time of the suite is XLA compiling programs that run once, and a third
# of it is for optimisations; the kernels behind a custom call are not touched by this.
COMPILE_FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def make_step(case: Case, implementation: str | None):
    """Return a jitted (floats, others, cotangents) -> (out, lse), gradients."""

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def step(floats, others, cotangents):
        moved = {name: x for name, x in floats.items() if name in moving(case, floats)}
        results, vjp = jax.vjp(
            lambda moved: call(case, implementation, {**floats, **moved}, others), moved
        )
        return results, vjp(cotangents)[0]

    return step


def moving(case: Case, floats: dict) -> list[str]:
    """Return the names of the operands that are differentiated."""
    is_fixed = "score." if case.fixed_mods else "no such name"
    return [name for name in floats if not name.startswith(is_fixed)]


def run_backend(problem: Problem, implementation: str | None):
    """Return (out, lse), gradients as numpy arrays."""
    floats = poisoned(problem) if problem.case.poison else problem.floats
    operands = jax.tree.map(jnp.asarray, (floats, problem.others, problem.cotangents))
    step = make_step(problem.case, implementation)
    with warnings.catch_warnings():
        if problem.case.deterministic:
            # On a GPU some gradients are added up by atomics; plain JAX takes over.
            warnings.filterwarnings("ignore", "attention runs in plain JAX.*atomics")
        return jax.tree.map(np.asarray, step(*operands))


# -------------------------------------------------------------------------- oracle


def run_dense(problem: Problem, compute: type = np.float64, storage=None):
    """Return the dense result, its gradients and the sizes of their terms."""
    case = problem.case
    live, dead_rows, q_idx, kv_idx = _make_live(case, problem.others)
    f = problem.floats
    batch = live.shape[0]

    def flat(x, trailing):
        return x.reshape(batch, *x.shape[x.ndim - trailing :])

    bias = f.get("bias")
    if bias is not None:
        lead = bias.shape[:-3]
        bias = bias.reshape(math.prod(lead), *bias.shape[-3:])
    score_mods = []
    for m, name in enumerate(case.score_mods):
        entry = catalogue.SCORE_MODS[name]
        params = tuple(f[k] for k in _keys(f, f"score.{m}."))
        score_mods.append(oracle.ScoreTwin(params, entry.loads, entry.value))
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    dense = oracle.attention(
        flat(f["query"], 3),
        flat(f["key"], 3),
        flat(f["value"], 3),
        scale=f.get("scale", scale),
        live=live,
        q_idx=q_idx,
        kv_idx=kv_idx,
        dead_rows=dead_rows,
        bias=bias,
        score_mods=score_mods,
        sinks=f.get("sinks"),
        compute=compute,
        storage=storage,
    )
    dout, dlse = problem.cotangents
    grads, magnitudes = dense.backward(flat(dout, 3), flat(dlse, 2))
    out = dense.out.reshape(dout.shape)
    lse = dense.lse.reshape(dlse.shape)
    grads = {k: grads[k].reshape(f[k].shape) for k in f}
    magnitudes = {k: magnitudes[k].reshape(f[k].shape) for k in f}
    return (out, lse), grads, magnitudes, dense.score_size


def check(problem: Problem, actual) -> None:
    """Compare a backend's ((out, lse), gradients) with the oracle."""
    case = problem.case
    half = case.dtype in ("bfloat16", "float16")
    exact, grads, magnitudes, score_size = run_dense(problem)
    if case.dtype == "float64":
        plain, plain_grads = exact, grads
    else:
        storage = np.dtype(case.dtype) if half else None
        plain, plain_grads, *_ = run_dense(problem, np.float32, storage)
    (out, lse), actual_grads = actual
    assert out.dtype == np.dtype(case.dtype)
    assert lse.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    value_size = float(
        np.max(abs(problem.floats["value"].astype(np.float64)), initial=0)
    )
    oracle.assert_close(
        out, exact[0], plain[0], value_size,
        factor=2, score_size=score_size, what="out",
    )  # fmt: skip
    oracle.assert_close(
        lse, exact[1], plain[1], 1 + score_size,
        factor=2, score_size=0.0, what="lse",
    )  # fmt: skip
    assert set(actual_grads) == set(moving(case, grads))
    for name, grad in actual_grads.items():
        assert grad.dtype == problem.floats[name].dtype, name
        oracle.assert_close(
            grad, grads[name], plain_grads[name], magnitudes[name],
            factor=4, score_size=score_size, what=f"gradient of {name}",
            storage=np.dtype(case.dtype),
        )  # fmt: skip


def check_case(case: Case, implementation: str | None) -> None:
    problem = make_problem(case)
    refused = [catalogue.SCORE_MODS[name].refused for name in case.score_mods]
    if implementation == "ffi" and any(refused):
        words = next(filter(None, refused))
        with pytest.raises(NotImplementedError, match=f"primitive `{words}`"):
            run_backend(problem, implementation)
        return
    check(problem, run_backend(problem, implementation))
