"""The custom calls of the C++ CPU backend themselves, against NumPy in float64."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax
from fkl_jax import _ext

FWD, BWD = "fkl_attention_fwd", "fkl_attention_bwd"
OPS = {name: number for number, name in enumerate(_ext.program_ops())}

F32, I32, BOOL = 0, 1, 2
SCORE, B, H, Q, KV, CT = range(6)


def assemble(records, num_registers, result, dscore=-1, grads=(), extra=()):
    """Bytecode of docs/internals.md from (op, type, stage, reg, a, b, c, imm) rows."""
    head = [1, len(records), num_registers, result, dscore, len(grads), len(extra)]
    body = [x for grad in grads for x in grad]
    for op, *rest in records:
        body += [OPS[op], *rest, *[0] * (7 - len(rest))]
    return np.array(head + body + list(extra), np.int32)


def causal_code():  # kv <= q
    return assemble(
        [
            ("input", I32, 1, 0, Q),
            ("input", I32, 2, 0, KV),
            ("le.i32", BOOL, 2, 1, 1, 0),
        ],
        2,
        2,
    )


def float_bits(x):
    return int(np.float32(x).view(np.int32))


def softcap_code(cap, derivative):  # cap * tanh(score / cap)
    records = [
        ("input", F32, 2, 0, SCORE),
        ("const", F32, 0, 0, 0, 0, 0, float_bits(cap)),
        ("div.f32", F32, 2, 1, 0, 1),
        ("tanh.f32", F32, 2, 2, 2),
        ("mul.f32", F32, 2, 3, 3, 1),
    ]
    if not derivative:
        return assemble(records, 4, 4)
    records += [
        ("const", F32, 0, 0, 0, 0, 0, float_bits(1)),
        ("input", F32, 3, 4, CT),
        ("mul.f32", F32, 3, 5, 3, 3),
        ("sub.f32", F32, 3, 5, 5, 7),
        ("mul.f32", F32, 3, 5, 6, 8),
    ]
    return assemble(records, 6, 4, dscore=9)


def table_code(derivative):  # score + capture.0[kv]
    records = [
        ("input", F32, 2, 0, SCORE),
        ("input", I32, 2, 1, KV),
        ("load", F32, 2, 1, 0, 0, 1, 1),
        ("add.f32", F32, 2, 2, 0, 2),
    ]
    if not derivative:
        return assemble(records, 3, 3, extra=[1])
    records += [("input", F32, 3, 3, CT)]
    return assemble(records, 4, 3, dscore=4, grads=[(2, 4)], extra=[1])


@dataclass
class Case:
    """Operands by role, with leading vmap axes; what the oracle must know besides."""

    operands: dict
    num_batch_dims: int = 1
    block: tuple = (0, 0)
    causal: bool = False
    softcap: float | None = None
    table: bool = False
    full_precision: bool = True
    deterministic: bool = True
    results: tuple = field(default=("query", "key", "value", "scale"))

    def sizes(self):
        q, k, v = (self.operands[r] for r in ("query", "key", "value"))
        num_vmap = q.ndim - 3 - self.num_batch_dims
        vmap = [
            max((x.shape[i] for x in self.operands.values()), key=lambda n: (n != 1, n))
            for i in range(num_vmap)
        ]
        return (
            tuple(vmap),
            q.shape[num_vmap:-3],
            q.shape[-3:],
            k.shape[-3:],
            v.shape[-1],
        )

    def call(self, name, result_types, results, extra=()):
        derivative = name == BWD
        score = np.zeros(0, np.int32)
        if self.softcap is not None:
            score = softcap_code(self.softcap, derivative)
        if self.table:
            score = table_code(derivative)
        operands = dict(self.operands, **dict(extra))
        return jax.ffi.ffi_call(name, result_types)(
            *operands.values(),
            abi=1,
            spec="test",
            operands=" ".join(operands),
            results=" ".join(results),
            num_batch_dims=self.num_batch_dims,
            block_q=self.block[0],
            block_kv=self.block[1],
            score_code=score,
            mask_code=causal_code() if self.causal else np.zeros(0, np.int32),
            deterministic=self.deterministic,
            full_precision=self.full_precision,
        )

    def forward(self):
        vmap, batch, (t, n, _), _, hv = self.sizes()
        outer = int(np.prod(vmap + batch))
        dtype = self.operands["query"].dtype
        types = (
            jax.ShapeDtypeStruct((*vmap, *batch, t, n, hv), dtype),
            jax.ShapeDtypeStruct((outer * n, t), jnp.float32),
        )
        out, lse = self.call(FWD, types, ("out", "lse"))
        return out, lse.reshape(*vmap, *batch, n, t)

    def backward(self, out, lse, dout, dlse=None):
        vmap = self.sizes()[0]
        types = []
        for role in self.results:
            x = self.operands[role]
            is_input = role in ("query", "key", "value")
            shape = vmap + x.shape[len(vmap) :]
            types.append(
                jax.ShapeDtypeStruct(shape, x.dtype if is_input else jnp.float32)
            )
        extra = {"out": out, "lse": lse, "dout": dout}
        if dlse is not None:
            extra["dlse"] = dlse
        results = self.call(BWD, tuple(types), self.results, extra)
        return dict(zip(self.results, results, strict=True))


def oracle(case, dout=None, dlse=None):
    """out, lse and the gradients by role in float64, with NumPy's broadcasting."""
    vmap, batch, (t, n, _), (s, k, _), _ = case.sizes()
    ops = {
        r: np.asarray(x).astype(np.float64) if x.dtype.kind == "V" else np.asarray(x)
        for r, x in case.operands.items()
    }
    nv, nb = len(vmap), len(batch)

    def full(role, *inner):  # [*V, *B, *inner]
        x = ops[role]
        if role in ("scale",):
            x = x.reshape(x.shape + (1,) * nb)
        if role in ("sinks", "capture.0"):
            x = x.reshape(x.shape[:nv] + (1,) * nb + x.shape[nv:])
        return np.broadcast_to(x, vmap + batch + inner)

    def heads(role, size):  # [*V, *B, N, L, D], zero where it is not finite (dead rows)
        x = full(role, *ops[role].shape[-3:]).astype(np.float64)
        x = np.where(np.isfinite(x), x, 0)
        return np.repeat(np.moveaxis(x, -2, -3), size // x.shape[-2], axis=-3)

    q, key, v = heads("query", n), heads("key", n), heads("value", n)
    scale = full("scale").astype(np.float64)[..., None, None, None]
    raw = np.einsum("...id,...jd->...ij", q, key)
    x = raw * scale
    if "bias" in ops:
        x = x + np.broadcast_to(ops["bias"], vmap + batch + (n, t, s)).astype(
            np.float64
        )
    derivative = np.ones_like(x)
    if case.softcap is not None:
        tanh = np.tanh(x / case.softcap)
        x, derivative = case.softcap * tanh, 1 - tanh**2
    if case.table:
        x = x + full("capture.0", s)[..., None, None, :].astype(np.float64)
    live = np.ones(x.shape, bool)
    i, j = np.arange(t)[:, None], np.arange(s)[None, :]
    offsets = [
        full(r).astype(np.int64)[..., None, None, None] if r in ops else 0
        for r in ("q_offset", "kv_offset")
    ]
    if case.causal:
        live &= j + offsets[1] <= i + offsets[0]
    if "q_segment_ids" in ops:
        qs = full("q_segment_ids", t)[..., None, :, None]
        ks = full("kv_segment_ids", s)[..., None, None, :]
        live &= (qs == ks) & (qs >= 0)
    dead_q = np.zeros(vmap + batch + (1, t), bool)
    if "q_seq_lengths" in ops:
        dead_q = np.arange(t) >= full("q_seq_lengths")[..., None, None]
        live &= ~dead_q[..., None]
    if "kv_seq_lengths" in ops:
        live &= j < full("kv_seq_lengths")[..., None, None, None]
    if "block_mask" in ops:
        blocks = full("block_mask", n, *ops["block_mask"].shape[-2:])
        live &= (
            blocks[..., np.arange(t) // case.block[0], :][
                ..., np.arange(s) // case.block[1]
            ]
            != 0
        )
    x = np.where(live, x, -np.inf)
    top = x.max(-1, initial=-np.inf)
    sink = np.full(top.shape, -np.inf)
    if "sinks" in ops:
        sink = np.where(dead_q, -np.inf, full("sinks", n)[..., None].astype(np.float64))
    top = np.maximum(top, sink)
    safe = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(np.exp(x - safe[..., None]).sum(-1) + np.exp(sink - safe))
    p = np.exp(x - np.where(np.isfinite(lse), lse, 0)[..., None])
    out = np.einsum("...ij,...jd->...id", p, v)
    if dout is None:
        return np.moveaxis(out, -3, -2), lse
    do = np.moveaxis(np.asarray(dout, np.float64), -2, -3)
    do = np.where(np.isfinite(do), do, 0)
    dp = np.einsum("...id,...jd->...ij", do, v)
    delta = (do * out).sum(-1) - (0 if dlse is None else np.asarray(dlse, np.float64))
    ds = p * (dp - delta[..., None]) * derivative

    def reduce_to(x, shape, ndim_v=nv):  # sums over what the operand broadcasts
        axes = tuple(
            a for a in range(ndim_v, x.ndim) if shape[a] == 1 and x.shape[a] != 1
        )
        return x.sum(axes, keepdims=True)

    def grouped(x):  # [*V, *B, N, L, D] -> [*V, *B, L, K, D]
        x = x.reshape(*x.shape[:-3], k, n // k, *x.shape[-2:]).sum(-3)
        return np.moveaxis(x, -3, -2)

    grads = {
        "query": np.moveaxis(np.einsum("...ij,...jd->...id", ds, key) * scale, -3, -2),
        "key": grouped(np.einsum("...ij,...id->...jd", ds, q) * scale),
        "value": grouped(np.einsum("...ij,...id->...jd", p, do)),
        "scale": (ds * raw).reshape(*vmap, -1).sum(-1),
    }
    if "bias" in ops:
        grads["bias"] = reduce_to(ds, (1,) * nv + ops["bias"].shape[nv:])
    if case.table:
        grads["capture.0"] = ds.sum(tuple(range(nv, ds.ndim - 1)))
    return np.moveaxis(out, -3, -2), lse, grads


def random_case(seed):
    """Every optional operand, odd sizes and vmap axes with 1s, chosen by the seed."""
    rng = np.random.default_rng(seed)
    flip = lambda p=0.5: rng.random() < p  # noqa: E731
    pick = lambda *xs: xs[rng.integers(len(xs))]  # noqa: E731
    dtype = pick(jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)
    vmap = pick((), (), (2,), (2, 3))
    batch = pick((), (1,), (2,), (2, 2)) if len(vmap) < 2 else pick((), (2,))
    k, group = pick(1, 2, 3), pick(1, 1, 2, 4)
    n = k * group
    t, s = pick(1, 2, 3, 17, 97, 130, 200), pick(1, 5, 33, 64, 130, 257, 300, 1100)
    h, hv = pick(1, 8, 20, 33, 64, 80), pick(1, 8, 24, 32, 47, 64)

    def lead():  # vmap axes, each full or 1
        return tuple(int(pick(x, x, 1)) for x in vmap)

    def normal(*shape, to=dtype):
        return jnp.asarray(rng.standard_normal(shape), to)

    def integers(low, high, *shape):
        return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

    operands = {
        "query": normal(*vmap, *batch, t, n, h),
        "key": normal(*lead(), *batch, s, k, h),
        "value": normal(*lead(), *batch, s, k, hv),
        "scale": jnp.asarray(
            rng.choice([h**-0.5, -(h**-0.5), 0.3, 0.0]) * np.ones(lead()), jnp.float32
        ),
    }
    case = Case(operands, len(batch), full_precision=bool(flip(0.7)))
    results = ["query", "key", "value", "scale"]
    if flip():
        inner = [int(pick(x, x, 1)) for x in (*batch, n, t, s)]
        operands["bias"] = normal(*lead(), *inner, to=pick(jnp.float32, dtype))
        results.append("bias")
    if flip(0.3):
        operands["q_segment_ids"] = jnp.sort(integers(-1, 3, *lead(), *batch, t), -1)
        operands["kv_segment_ids"] = jnp.sort(integers(-1, 3, *lead(), *batch, s), -1)
    if flip(0.3):
        operands["q_seq_lengths"] = integers(0, t + 2, *lead(), *batch)
    if flip(0.4):
        operands["kv_seq_lengths"] = integers(0, s + 2, *lead(), *batch)
    if flip():
        case.causal = True
        if flip():
            operands["q_offset"] = integers(-5, s, *lead(), *batch)
        if flip(0.3):
            operands["kv_offset"] = integers(-5, 20, *lead(), *batch)
    if flip(0.3):
        operands["sinks"] = normal(*lead(), n, to=jnp.float32)
    if flip(0.3):
        case.block = (pick(1, 16, 128), pick(7, 32, 128))
        inner = [int(pick(x, 1)) for x in (*batch, n)]
        blocks = [-(-t // case.block[0]), -(-s // case.block[1])]
        operands["block_mask"] = jnp.asarray(
            rng.random((*lead(), *inner, *blocks)) < 0.5, jnp.uint8
        )
    program = pick(None, None, "softcap", "table")
    if program == "softcap":
        case.softcap = 2.0
    if program == "table":
        case.table = True
        size = s + 20 if "kv_offset" not in operands and "q_offset" in operands else s
        operands.pop("kv_offset", None)
        operands["capture.0"] = normal(*lead(), size, to=jnp.float32)[..., :s]
        results.append("capture.0")
    case.results = tuple(r for r in results if flip(0.8)) or ("query",)
    shape = (*vmap, *batch, t, n, hv)
    dout = normal(*shape)
    dlse = None
    if flip():
        dlse = normal(*vmap, *batch, n, t, to=jnp.float32)
    return case, dout, dlse


def poisoned(case):
    """NaN and infinities in rows of Q, K and V that the lengths declare dead."""
    vmap, batch, (t, _, _), (s, _, _), _ = case.sizes()
    operands = dict(case.operands)
    nv = len(vmap)

    def poison(role, lengths, size):
        x = operands[role]
        full = np.broadcast_to(np.asarray(lengths), vmap + batch)
        # A broadcast operand is dead only where every vmap element says so.
        axes = tuple(i for i in range(nv) if x.shape[i] == 1)
        full = full.max(axes, keepdims=True) if axes else full
        dead = np.arange(size) >= full[..., None]
        operands[role] = jnp.where(dead[..., None, None], jnp.nan, x)

    if "kv_seq_lengths" in operands:
        poison("key", operands["kv_seq_lengths"], s)
        poison("value", operands["kv_seq_lengths"], s)
    if "q_seq_lengths" in operands:
        poison("query", operands["q_seq_lengths"], t)
    return Case(
        operands,
        case.num_batch_dims,
        case.block,
        case.causal,
        case.softcap,
        case.table,
        case.full_precision,
        case.deterministic,
        case.results,
    )


def assert_close(actual, expected, tolerance, what):
    actual = np.asarray(actual.astype(jnp.float32), np.float64)
    assert actual.shape == expected.shape, what
    error = np.abs(actual - expected)
    bound = tolerance * (1 + np.abs(expected).max(initial=0))
    assert np.all(np.isfinite(actual)), what
    assert error.max(initial=0) <= bound, (what, error.max(), bound)


def check(seed):
    case, dout, dlse = random_case(seed)
    case = poisoned(case)
    out, lse = case.forward()
    expected_out, expected_lse = oracle(case)
    dtype = case.operands["query"].dtype
    eps = {"float32": 4e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype.name]
    dead = np.isneginf(expected_lse)
    assert np.array_equal(np.isneginf(np.asarray(lse)), dead), "dead rows"
    assert_close(jnp.where(dead, 0, lse), np.where(dead, 0, expected_lse), 4e-6, "lse")
    assert_close(out, expected_out, eps, "out")
    assert not np.any(np.asarray(out)[np.moveaxis(dead, -2, -1)]), "dead rows give 0"
    _, _, expected = oracle(case, dout, dlse)
    grads = case.backward(out, lse, dout, dlse)
    again = case.backward(out, lse, dout, dlse)
    for role, grad in grads.items():
        wide = role in ("scale", "bias", "capture.0")
        # Sums over everything of terms that each carry half an ulp of the stored out.
        scale = (10 if eps < 1e-4 else 40) if wide else 3
        assert_close(grad, expected[role].reshape(grad.shape), scale * eps, role)
        assert np.array_equal(np.asarray(grad), np.asarray(again[role])), role


@pytest.mark.parametrize("seed", range(120))
def test_random_calls(seed):
    check(seed)


def test_threads_keep_the_cores_that_they_may_run_on():
    """A helper may move to another core; nothing of that remains."""

    def allowed():
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that ends
                found[task.name] = os.sched_getaffinity(int(task.name))
        return found

    q = jnp.ones((2, 512, 4, 32))
    f = jax.jit(lambda q: fkl_jax.attention(q, q, q, implementation="ffi"))
    jax.block_until_ready(f(q))
    before = allowed()
    for _ in range(50):
        jax.block_until_ready(f(q))
    after = allowed()
    assert {name: after[name] for name in before if name in after} == {
        name: cores for name, cores in before.items() if name in after
    }
