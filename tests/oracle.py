"""Dense attention in plain numpy: what every backend is compared with.

Nothing here comes from `fkl_jax` or JAX.  The derivative of a score mod is taken by a
complex step (`Im f(x + ih) / h`, exact to rounding for analytic formulas), so that a
twin of a mod is its formula and nothing else.

The same code in float32, rounding where the storage dtype rounds, is the *plain
version*: the error that it makes against float64 is the error a backend may make.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

Array = np.ndarray
# A score that a mod reads from an array: number of the parameter, and its index.
Load = tuple[int, tuple]


@dataclasses.dataclass(frozen=True)
class ScoreTwin:
    """A score mod as numpy: `value(s, b, h, q_idx, kv_idx, *loaded)`."""

    params: tuple[Array, ...]
    loads: Callable[..., Sequence[Load]]
    value: Callable[..., Array]


@dataclasses.dataclass(frozen=True)
class Dense:
    """The result of `attention`, and how to differentiate it."""

    out: Array  # (B, T, N, Hv)
    lse: Array  # (B, N, T)
    # Largest absolute score on the way to the softmax: exp() turns an absolute error
    # of a score, which is relative to this, into a relative error of a probability.
    score_size: float
    # (dout, dlse) -> gradients by role, and by role the sum of the absolute values of
    # the terms of each gradient (what its rounding error is relative to).
    backward: Callable[[Array, Array], tuple[Mapping[str, Array], Mapping[str, Array]]]


def attention(
    query: Array,  # (B, T, N, H)
    key: Array,  # (B, S, K, H)
    value: Array,  # (B, S, K, Hv)
    *,
    scale: float,
    live: Array,  # (B, N, T, S) bool
    q_idx: Array,  # (B, T) global
    kv_idx: Array,  # (B, S) global
    dead_rows: Array,  # (B, T) bool: beyond q_seq_lengths, dead even with a sink
    bias: Array | None = None,  # broadcasts to (B, N, T, S)
    score_mods: Sequence[ScoreTwin] = (),
    sinks: Array | None = None,  # (N,)
    compute: type = np.float64,
    storage: np.dtype | None = None,
) -> Dense:
    """Return attention computed in `compute`, rounding tensors to `storage`."""
    stepped = np.complex128 if compute is np.float64 else np.complex64
    step = 1e-30 if compute is np.float64 else 1e-20

    def real(x: Array) -> Array:
        return np.asarray(x).astype(compute)

    def rounded(x: Array) -> Array:
        return x if storage is None else x.astype(storage).astype(compute)

    num_q_heads, num_kv_heads = query.shape[2], key.shape[2]
    group = num_q_heads // num_kv_heads
    q = real(query)
    k = np.repeat(real(key), group, axis=2)
    v = np.repeat(real(value), group, axis=2)
    scale = compute(scale)
    b = np.arange(q.shape[0])[:, None, None, None]
    h = np.arange(num_q_heads)[None, :, None, None]
    qi = np.asarray(q_idx)[:, None, :, None]
    kj = np.asarray(kv_idx)[:, None, None, :]

    raw = np.einsum("bthd,bshd->bhts", q, k)
    raw_abs = np.einsum("bthd,bshd->bhts", abs(q), abs(k))
    score = scale * raw
    size = abs(scale) * raw_abs
    if bias is not None:
        score = score + real(bias)
        size = size + abs(real(bias))
    inputs, loaded = [], []
    for mod in score_mods:
        values = [real(mod.params[n])[i] for n, i in mod.loads(mod, b, h, qi, kj)]
        inputs.append(score)
        loaded.append(values)
        with np.errstate(all="ignore"):
            score = real(mod.value(score, b, h, real(qi), real(kj), *values))
            score = np.broadcast_to(score, raw.shape)
        size = size + abs(score)

    live = np.broadcast_to(live, raw.shape) & ~dead_rows[:, None, :, None]
    score = np.where(live, score, -np.inf)
    sink = np.full((1, num_q_heads, 1), -np.inf, compute)
    if sinks is not None:
        sink = real(sinks)[None, :, None]
    row_max = np.maximum(score.max(axis=-1, initial=-np.inf), sink)
    safe_max = np.where(np.isfinite(row_max), row_max, 0)
    with np.errstate(divide="ignore"):
        total = np.exp(score - safe_max[..., None]).sum(-1) + np.exp(sink - safe_max)
        lse = np.log(total) + safe_max
    lse = np.where(dead_rows[:, None, :], -np.inf, lse).astype(compute)
    safe_lse = np.where(np.isfinite(lse), lse, 0)
    prob = np.where(live, np.exp(score - safe_lse[..., None]), 0).astype(compute)
    out = np.einsum("bhts,bshd->bthd", rounded(prob), v)
    out = rounded(out)
    score_size = float(np.max(np.where(live, size, 0), initial=0.0))

    def backward(dout: Array, dlse: Array):
        dout, dlse = real(dout), real(dlse)
        dead_lse = ~np.isfinite(lse)
        dlse = np.where(dead_lse, 0, dlse)
        dprob = np.einsum("bthd,bshd->bhts", dout, v)
        delta = np.einsum("bthd,bthd->bht", dout, out) - dlse
        ds = prob * (dprob - delta[..., None])
        ds_abs = prob * (
            np.einsum("bthd,bshd->bhts", abs(dout), abs(v))
            + (np.einsum("bthd,bthd->bht", abs(dout), abs(out)) + abs(dlse))[..., None]
        )
        grads: dict[str, Array] = {}
        sizes: dict[str, Array] = {}
        if sinks is not None:
            with np.errstate(over="ignore"):
                p_sink = np.where(dead_lse, 0, np.exp(sink - safe_lse))
            grads["sinks"] = -(p_sink * delta).sum((0, 2))
            sizes["sinks"] = (
                p_sink * (np.einsum("bthd,bthd->bht", abs(dout), abs(out)) + abs(dlse))
            ).sum((0, 2))
        for m in reversed(range(len(score_mods))):
            mod, x, values = score_mods[m], inputs[m], loaded[m]
            loads = list(mod.loads(mod, b, h, qi, kj))
            args = [x, *values]

            def partial(n, mod=mod, args=args):
                moved = [a.astype(stepped) if i == n else a for i, a in enumerate(args)]
                moved[n] = moved[n] + stepped(1j * step)
                with np.errstate(all="ignore"):
                    y = mod.value(moved[0], b, h, real(qi), real(kj), *moved[1:])
                y = np.broadcast_to(np.asarray(y, stepped), raw.shape)
                return np.where(live, y.imag / compute(step), 0).astype(compute)

            for n, param in enumerate(mod.params):
                grads[f"score.{m}.{n}"] = np.zeros(param.shape, compute)
                sizes[f"score.{m}.{n}"] = np.zeros(param.shape, compute)
            for n, (which, index) in enumerate(loads):
                slope = partial(n + 1)
                for target, term in ((grads, ds * slope), (sizes, ds_abs * abs(slope))):
                    at = tuple(np.broadcast_to(i, raw.shape) for i in index)
                    # No index at all stands for the one element of a scalar.
                    term = term if at else term.sum()
                    np.add.at(target[f"score.{m}.{which}"], at, term)
            slope = partial(0)
            ds = ds * slope
            # + 1: a slope such as 1 - tanh^2 has an absolute error, not a relative one.
            ds_abs = ds_abs * (abs(slope) + 1)
        ds = rounded(ds)
        if bias is not None:
            axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
            grads["bias"] = ds.sum(axes, keepdims=True)
            sizes["bias"] = ds_abs.sum(axes, keepdims=True)
        grads["scale"] = (ds * raw).sum()
        sizes["scale"] = (ds_abs * raw_abs).sum()

        def fold(x):  # sum over the query heads of a group
            return x.reshape(*x.shape[:2], num_kv_heads, group, x.shape[-1]).sum(3)

        ks, qs, vs = "bhts,bshd->bthd", "bhts,bthd->bshd", "bhts,bthd->bshd"
        grads["query"] = scale * np.einsum(ks, ds, k)
        sizes["query"] = abs(scale) * np.einsum(ks, ds_abs, abs(k))
        grads["key"] = fold(scale * np.einsum(qs, ds, q))
        sizes["key"] = fold(abs(scale) * np.einsum(qs, ds_abs, abs(q)))
        grads["value"] = fold(np.einsum(vs, rounded(prob), dout))
        sizes["value"] = fold(np.einsum(vs, prob, abs(dout)))
        return grads, sizes

    return Dense(out, lse, score_size, backward)


def eps(dtype) -> float:
    """Return the distance from 1 to the next number of `dtype`."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def assert_close(
    actual: Array,
    exact: Array,
    plain: Array,
    size: Array | float,
    *,
    factor: float,
    score_size: float,
    what: str,
    storage: np.dtype | None = None,
) -> None:
    """Hold the error of `actual` to `factor` times that of the plain version.

    The floor is what rounding can do to any order of the same operations, computed
    from the data: a result is rounded to its dtype (`eps * |exact|`); each of its
    terms, whose absolute values add up to `size`, carries the relative error of a
    probability, `eps32 * (a few + score_size)`, and for a half-precision `storage`
    dtype (by default that of the result) half an ulp of the probability, of the score
    gradient or of the stored output.
    """
    actual = np.asarray(actual)
    compute = eps(np.float64 if actual.dtype == np.float64 else np.float32)
    own = eps(actual.dtype)
    floor = compute * (4 + score_size) * size
    stored = own if storage is None else max(own, eps(storage))
    if stored > compute:
        floor = floor + 0.5 * stored * size
    assert actual.shape == exact.shape, f"{what}: {actual.shape} != {exact.shape}"
    actual = actual.astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(
        actual[~finite], exact[~finite], err_msg=f"{what}: infinities differ"
    )
    floor = np.broadcast_to(floor, exact.shape)[finite]
    truth = exact[finite]
    error = abs(actual[finite] - truth)
    plain_error = np.max(abs(plain[finite].astype(np.float64) - truth), initial=0.0)
    allowed = factor * plain_error + own * abs(truth) + floor
    wrong = ~(error <= allowed)  # also catches NaN
    if wrong.any():
        worst = np.argmax(np.where(np.isnan(error), np.inf, error - allowed))
        where = tuple(int(i) for i in np.argwhere(finite)[worst])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} values are wrong; at {where} got "
            f"{actual[where]!r}, exact {exact[where]!r}, error {error[worst]:.3g}, "
            f"allowed {allowed[worst]:.3g} (plain version: {plain_error:.3g})"
        )
