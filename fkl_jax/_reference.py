"""The operator in plain JAX: what every other backend is compared with, and what runs
where no kernel does.

Blockwise over queries and keys, so that no T x S array is ever made; differentiable
any number of times, in both modes; every feature; float64 too. The order of the
formula is that of docs/semantics.md.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _trace
from ._spec import AttentionSpec, TracedMod

_BLOCK_Q = 256
_BLOCK_KV = 512


def forward(
    spec: AttentionSpec, operands: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return out (*V, *B, T, N, Hv) and lse (*V, *B, N, T)."""
    named = spec.named(operands)
    if _num_vmap_axes(spec, named):
        return _over_vmap_axis(named, lambda inner: forward(spec, inner))
    return _forward(_Problem(spec, named))


def backward(
    spec: AttentionSpec,
    operands: Sequence[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
    results: Sequence[str],
) -> tuple[jax.Array, ...]:
    """Return the gradients named in `results`, from the forward's out and lse and
    their cotangents."""
    named = spec.named(operands)
    saved = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    if _num_vmap_axes(spec, named):
        return _over_vmap_axis(
            named | saved,
            lambda x: backward(spec, x[:-4], x[-4], x[-3], x[-2], x[-1], results),
        )
    return _backward(_Problem(spec, named), saved, results)


# --- private -------------------------------------------------------------------------


def _num_vmap_axes(spec: AttentionSpec, named: dict[str, Any]) -> int:
    return named["query"].ndim - spec.base_ndim("query")


def _over_vmap_axis(named: dict[str, Any], f: Callable[[list[Any]], Any]) -> Any:
    """Map `f` over the leading axis; an operand whose axis has size 1 is the same for
    all."""
    size = max((x.shape[0] for x in named.values()), default=1)
    if any(x.shape[0] == 0 for x in named.values()):
        size = 0
    axes = [0 if x.shape[0] == size else None for x in named.values()]
    args = [x if a == 0 else x[0] for x, a in zip(named.values(), axes, strict=True)]
    return jax.vmap(lambda *xs: f(list(xs)), in_axes=tuple(axes), axis_size=size)(*args)


class _Problem:
    """The operands of one call with a single batch axis, padded to whole blocks."""

    def __init__(self, spec: AttentionSpec, named: dict[str, Any]):
        self.spec = spec
        nb = spec.num_batch_dims
        query, key, value = named["query"], named["key"], named["value"]
        self.batch_shape = query.shape[:nb]
        self.dtype = query.dtype
        self.acc = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
        self.B = math.prod(self.batch_shape)
        self.T, self.N, self.H = query.shape[nb:]
        self.S, self.K, self.Hv = value.shape[nb:]
        self.G = self.N // max(self.K, 1)
        self.bq, self.nq = _blocks(self.T, _BLOCK_Q)
        self.bk, self.nk = _blocks(self.S, _BLOCK_KV)
        self.precision = {"default": None, "high": "high", "highest": "highest"}[
            spec.precision
        ]

        self.q = _pad(self._flat(query).astype(self.acc), 1, self.bq * self.nq)
        self.k = _pad(self._flat(key).astype(self.acc), 1, self.bk * self.nk)
        self.v = _pad(self._flat(value).astype(self.acc), 1, self.bk * self.nk)
        self.scale = named["scale"].astype(self.acc)
        self.bias = self._bias(named.get("bias"))
        self.bias_shape = None if "bias" not in named else named["bias"].shape
        self.sinks = named.get("sinks")
        flat = {r: self._flat(named[r]) for r in _PER_BATCH if r in named}
        zero = jnp.zeros((self.B,), jnp.int32)
        self.q_offset = flat.get("q_offset", zero)
        self.kv_offset = flat.get("kv_offset", zero)
        self.b_index = flat.get("batch_index", zero)
        self.h_index = named.get("head_index", jnp.zeros((self.N,), jnp.int32))
        self.q_lengths = flat.get("q_seq_lengths")
        self.kv_lengths = flat.get("kv_seq_lengths")
        self.q_ids = self.kv_ids = None
        if "q_segment_ids" in flat:
            self.q_ids = _pad(flat["q_segment_ids"], 1, self.bq * self.nq, -1)
            self.kv_ids = _pad(flat["kv_segment_ids"], 1, self.bk * self.nk, -1)
        self.block_mask = None
        if "block_mask" in named and self.T * self.S != 0:
            self.block_mask = self._outer_flat(named["block_mask"])
        captures = [named[f"capture.{k}"] for k in range(len(spec.capture_ndims))]
        self.score_captures = captures[: spec.num_score_captures]
        self.mask_captures = captures[spec.num_score_captures :]
        self.has_masks = bool(
            spec.mask is not None
            or self.block_mask is not None
            or self.q_ids is not None
            or self.q_lengths is not None
            or self.kv_lengths is not None
        )
        if self.has_masks:
            self._clean()

    def _flat(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.B, *x.shape[len(self.batch_shape) :])

    def _outer_flat(self, x: jax.Array) -> jax.Array:
        """Flatten batch axes each of which is full or 1."""
        nb = len(self.batch_shape)
        if all(d == 1 for d in x.shape[:nb]):
            return x.reshape(1, *x.shape[nb:])
        return jnp.broadcast_to(x, (*self.batch_shape, *x.shape[nb:])).reshape(
            self.B, *x.shape[nb:]
        )

    def _bias(self, bias: jax.Array | None) -> jax.Array | None:
        """(B|1, N|1, padded T|1, padded S|1); the pullback of this is how its gradient
        gets its shape."""
        if bias is None:
            return None
        x = self._outer_flat(bias).astype(self.acc)
        if x.shape[2] != 1:
            x = _pad(x, 2, self.bq * self.nq)
        if x.shape[3] != 1:
            x = _pad(x, 3, self.bk * self.nk)
        return x

    def _clean(self) -> None:
        """Zero the rows of q, k and v that no live element touches: whatever they hold
        must not show."""
        row_live, key_live = self._any_live()
        self.q = jnp.where(jnp.swapaxes(row_live, 1, 2)[..., None], self.q, 0)
        keys = jnp.swapaxes(key_live, 1, 2)[..., None]
        self.k = jnp.where(keys, self.k, 0)
        self.v = jnp.where(keys, self.v, 0)

    def _any_live(self) -> tuple[jax.Array, jax.Array]:
        """Which query rows (B, N, T) and key rows (B, K, S) have any live element,
        padded to blocks."""

        def rows(keys: jax.Array, i0: jax.Array) -> tuple[jax.Array, jax.Array]:
            def cols(
                carry: tuple[jax.Array, jax.Array], j0: jax.Array
            ) -> tuple[Any, None]:
                row_any, keys = carry
                live = jnp.broadcast_to(
                    self.live(i0, j0), (self.B, self.N, self.bq, self.bk)
                )
                grouped = live.reshape(self.B, self.K, self.G, self.bq, self.bk).any(
                    (2, 3)
                )
                old = lax.dynamic_slice_in_dim(keys, j0, self.bk, 2)
                keys = lax.dynamic_update_slice_in_dim(keys, old | grouped, j0, 2)
                return (row_any | live.any(-1), keys), None

            start = jnp.zeros((self.B, self.N, self.bq), bool)
            (row_any, keys), _ = lax.scan(
                cols, (start, keys), _starts(self.nk, self.bk)
            )
            return keys, row_any

        keys = jnp.zeros((self.B, self.K, self.bk * self.nk), bool)
        keys, row_any = lax.scan(rows, keys, _starts(self.nq, self.bq))
        row_any = jnp.moveaxis(row_any, 0, 2).reshape(self.B, self.N, self.bq * self.nq)
        return row_any, keys

    def live(self, i0: jax.Array, j0: jax.Array) -> jax.Array:
        """Live elements of a block, bool, broadcastable to (B, N, bq, bk)."""
        i = i0 + jnp.arange(self.bq, dtype=jnp.int32)
        j = j0 + jnp.arange(self.bk, dtype=jnp.int32)
        out = (j < self.S)[None, None, None, :]
        if self.q_lengths is not None:
            out = out & (i[None, :] < self.q_lengths[:, None])[:, None, :, None]
        if self.kv_lengths is not None:
            out = out & (j[None, :] < self.kv_lengths[:, None])[:, None, None, :]
        if self.q_ids is not None:
            a = lax.dynamic_slice_in_dim(self.q_ids, i0, self.bq, 1)[:, None, :, None]
            assert self.kv_ids is not None
            b = lax.dynamic_slice_in_dim(self.kv_ids, j0, self.bk, 1)[:, None, None, :]
            out = out & (a == b) & (a >= 0)
        if self.block_mask is not None:
            rows = jnp.minimum(i // self.spec.block_q, self.block_mask.shape[2] - 1)
            cols = jnp.minimum(j // self.spec.block_kv, self.block_mask.shape[3] - 1)
            out = out & (self.block_mask[:, :, rows[:, None], cols[None, :]] != 0)
        if self.spec.mask is not None:
            captures = self.mask_captures
            f = _over_elements(lambda b, h, q, kv: self._mask(b, h, q, kv, captures))
            out = out & f(*self._indices(i, j))
        return out

    def _mask(self, b: Any, h: Any, q: Any, kv: Any, captures: Sequence[Any]) -> Any:
        assert self.spec.mask is not None
        traced = self.spec.mask.traced
        if traced.scalar is not None:
            read = functools.partial(_read_element, captures)
            return _trace.evaluate_with_loads(traced.scalar, (b, h, q, kv), read)
        whole = jax.extend.core.jaxpr_as_fun(traced.closed)
        return whole(b, h, q, kv, *captures)[0]

    def _indices(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
        q = i[None, :] + self.q_offset[:, None]
        kv = j[None, :] + self.kv_offset[:, None]
        return self.b_index, self.h_index, q.astype(jnp.int32), kv.astype(jnp.int32)

    def block(self, i0: jax.Array, j0: jax.Array) -> "_Block":
        """The operands of one block that the scores depend on."""
        bias = self.bias
        if bias is not None:
            if bias.shape[2] != 1:
                bias = lax.dynamic_slice_in_dim(bias, i0, self.bq, 2)
            if bias.shape[3] != 1:
                bias = lax.dynamic_slice_in_dim(bias, j0, self.bk, 3)
        return _Block(
            lax.dynamic_slice_in_dim(self.q, i0, self.bq, 1),
            lax.dynamic_slice_in_dim(self.k, j0, self.bk, 1),
            self.scale,
            bias,
            # Widened here, so that their gradients add up over blocks in full
            # precision.
            [
                c.astype(gradient_dtype(c.dtype))
                for c in self.score_captures
                if _is_float(c)
            ],
        )

    def scores(
        self, x: "_Block", i0: jax.Array, j0: jax.Array, live: jax.Array
    ) -> jax.Array:
        """Modified scores (B, N, bq, bk); arbitrary but harmless on dead elements."""
        q = x.q.reshape(self.B, self.bq, self.K, self.G, self.H)
        s = jnp.einsum("bikgd,bjkd->bkgij", q, x.k, precision=self.precision)
        s = x.scale * s.reshape(self.B, self.N, self.bq, self.bk)
        if x.bias is not None:
            s = s + x.bias
        if self.spec.score is None:
            return s
        i = i0 + jnp.arange(self.bq, dtype=jnp.int32)
        j = j0 + jnp.arange(self.bk, dtype=jnp.int32)
        floats = iter(x.captures)
        captures = [
            next(floats).astype(c.dtype) if _is_float(c) else c
            for c in self.score_captures
        ]
        # Those of the mask too: the first head and batch element of a device's part
        # are the last of all (`_local_spec.py`).
        f = _score_element(self.spec.score, [*captures, *self.mask_captures])
        return _over_elements(f, 2)(
            *self._indices(i, j), s, jnp.broadcast_to(live, s.shape)
        )


_PER_BATCH = (
    "q_segment_ids",
    "kv_segment_ids",
    "q_seq_lengths",
    "kv_seq_lengths",
    "q_offset",
    "kv_offset",
    "batch_index",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Block:
    """What the scores of a block are differentiated with respect to."""

    q: jax.Array
    k: jax.Array
    scale: jax.Array
    bias: jax.Array | None
    captures: list[jax.Array]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _blocks(n: int, size: int) -> tuple[int, int]:
    """Block size and number of blocks; an empty axis is one block of padding."""
    if not isinstance(n, int):  # of an export; it is not 0
        return size, -(-n // size)
    block = min(max(n, 1), size)
    return block, max(1, -(-n // block))


def _starts(count: int, size: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32) * size


def _pad(x: jax.Array, axis: int, size: int, value: Any = 0) -> jax.Array:
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def _over_elements(
    f: Callable[..., Any], num_elementwise: int = 0
) -> Callable[..., Any]:
    """Map a function of scalars (b, h, q, kv, *elements) over a block."""
    e = (0,) * num_elementwise
    f = jax.vmap(f, in_axes=(None, None, None, 0, *e))
    f = jax.vmap(f, in_axes=(None, None, 0, None, *e))
    f = jax.vmap(f, in_axes=(None, 0, None, None, *e))
    return jax.vmap(f, in_axes=(0, None, 0, 0, *e))


def _score_element(mod: TracedMod, captures: Sequence[jax.Array]) -> Callable[..., Any]:
    """The score mods at one element, as a function of (b, h, q, kv, s, live)."""
    traced = mod.traced
    if traced.scalar is None:
        whole = jax.extend.core.jaxpr_as_fun(traced.closed)
        return lambda b, h, q, kv, s, live: whole(s, b, h, q, kv, *captures)[0]

    def element(b: Any, h: Any, q: Any, kv: Any, s: Any, live: Any) -> Any:
        values: list[Any] = []

        def read(number: int, load: _trace.Load, indices: list[Any]) -> Any:
            values.append(_read_element(captures, number, load, indices))
            return values[-1]

        _trace.evaluate_with_loads(traced.scalar, (s, b, h, q, kv), read)
        floats = [k for k, load in enumerate(traced.loads) if load.is_float]
        rest = [v for k, v in enumerate(values) if k not in floats]
        f = _with_exact_zeros(functools.partial(_of_values, traced, tuple(floats)))
        return f((live, b, h, q, kv, *rest), s, *(values[k] for k in floats))

    return element


def _read_element(
    captures: Sequence[jax.Array], _: int, load: _trace.Load, indices: list[Any]
) -> Any:
    # `clip` in this mode clamps each index to its axis, and transposes to a
    # scatter-add.
    array = captures[load.capture]
    if not indices:
        return array
    return array.at[tuple(indices)].get(mode="clip", wrap_negative_indices=False)


def _of_values(
    traced: _trace.TracedFunction,
    floats: tuple[int, ...],
    fixed: Any,
    s: Any,
    *values: Any,
) -> Any:
    _, b, h, q, kv, *rest = fixed
    every, others = dict(zip(floats, values, strict=True)), iter(rest)
    loaded = [
        every[k] if k in every else next(others) for k in range(len(traced.loads))
    ]
    return _trace.evaluate_with_loads(
        traced.scalar, (s, b, h, q, kv), lambda k, _, __: loaded[k]
    )


def _with_exact_zeros(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f(fixed, *x)` where `fixed[0]` is live, 0 elsewhere, its derivatives of every
    order too.

    A dead element may make a mod return NaN, and 0 * NaN is NaN: so each partial
    derivative is computed and then selected, instead of letting a zero cotangent
    travel through the mod.
    """

    @jax.custom_jvp
    def clean(fixed: Any, *x: Any) -> Any:
        value = f(fixed, *x)
        # Formally a function of every x: under vmap JAX gives the value of a custom_jvp
        # the batch axes of its tangent only if it has them itself.
        for xk in x:
            value = lax.select(xk != xk, value, value)
        return jnp.where(fixed[0], value, jnp.zeros_like(value))

    @clean.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        fixed, *x = primals
        out = clean(fixed, *x)
        tangent = jnp.zeros_like(out)
        for k, t in enumerate(tangents[1:]):

            def partial(fixed: Any, *x: Any, k: int = k) -> Any:
                return jax.grad(
                    lambda xk: f(fixed, *x[:k], xk, *x[k + 1 :]).astype(xk.dtype)
                )(x[k])

            tangent = tangent + _with_exact_zeros(partial)(fixed, *x).astype(
                out.dtype
            ) * t.astype(out.dtype)
        return out, tangent

    return clean


def _forward(p: _Problem) -> tuple[jax.Array, jax.Array]:
    if p.B == 0 or p.T == 0 or p.N == 0:
        out = jnp.zeros((*p.batch_shape, p.T, p.N, p.Hv), p.dtype)
        return out, jnp.zeros((*p.batch_shape, p.N, p.T), p.acc)

    def q_block(i0: jax.Array) -> tuple[jax.Array, jax.Array]:
        def kv_block(carry: Any, j0: jax.Array) -> tuple[Any, None]:
            row_max, row_sum, acc = carry
            live = p.live(i0, j0)
            s = jnp.where(live, p.scores(p.block(i0, j0), i0, j0, live), -jnp.inf)
            new_max = lax.stop_gradient(jnp.maximum(row_max, s.max(-1)))
            # A row without a live key so far: subtract 0, so that exp(-inf) is 0 and
            # not NaN.
            shift = jnp.where(new_max == -jnp.inf, 0, new_max)
            e = jnp.exp(jnp.where(live, s - shift[..., None], -jnp.inf))
            alpha = jnp.exp(jnp.where(row_max == -jnp.inf, -jnp.inf, row_max - shift))
            v = lax.dynamic_slice_in_dim(p.v, j0, p.bk, 1)
            grouped = e.reshape(p.B, p.K, p.G, p.bq, p.bk)
            pv = jnp.einsum("bkgij,bjkd->bkgid", grouped, v, precision=p.precision)
            acc = alpha[..., None] * acc + pv.reshape(p.B, p.N, p.bq, p.Hv)
            return (new_max, alpha * row_sum + e.sum(-1), acc), None

        start = (
            jnp.full((p.B, p.N, p.bq), -jnp.inf, p.acc),
            jnp.zeros((p.B, p.N, p.bq), p.acc),
            jnp.zeros((p.B, p.N, p.bq, p.Hv), p.acc),
        )
        (row_max, row_sum, acc), _ = lax.scan(
            jax.checkpoint(kv_block), start, _starts(p.nk, p.bk)
        )
        if p.sinks is not None:
            sink = p.sinks.astype(p.acc)[None, :, None]
            if p.q_lengths is not None:
                i = i0 + jnp.arange(p.bq, dtype=jnp.int32)
                alive = (i[None, :] < p.q_lengths[:, None])[:, None, :]
                sink = jnp.where(alive, sink, -jnp.inf)
            new_max = lax.stop_gradient(jnp.maximum(row_max, sink))
            shift = jnp.where(new_max == -jnp.inf, 0, new_max)
            alpha = jnp.exp(jnp.where(row_max == -jnp.inf, -jnp.inf, row_max - shift))
            row_sum = alpha * row_sum + jnp.exp(
                jnp.where(sink == -jnp.inf, -jnp.inf, sink - shift)
            )
            acc, row_max = alpha[..., None] * acc, new_max
        is_empty = row_sum == 0
        safe_sum = jnp.where(is_empty, 1, row_sum)
        out = jnp.where(is_empty[..., None], 0, acc / safe_sum[..., None])
        shift = jnp.where(row_max == -jnp.inf, 0, row_max)
        lse = jnp.where(is_empty, -jnp.inf, shift + jnp.log(safe_sum))
        return jnp.swapaxes(out, 1, 2).astype(p.dtype), lse

    if p.nq == 1:
        out, lse = q_block(jnp.int32(0))
    else:
        # Recomputing a block of queries in the backward keeps memory linear in T.
        outs, lses = lax.map(jax.checkpoint(q_block), _starts(p.nq, p.bq))
        out = jnp.moveaxis(outs, 0, 1).reshape(p.B, p.nq * p.bq, p.N, p.Hv)[:, : p.T]
        lse = jnp.moveaxis(lses, 0, 2).reshape(p.B, p.N, p.nq * p.bq)[..., : p.T]
    return (
        out[:, : p.T].reshape(*p.batch_shape, p.T, p.N, p.Hv),
        lse[..., : p.T].reshape(*p.batch_shape, p.N, p.T),
    )


def _backward(
    p: _Problem, saved: dict[str, jax.Array], results: Sequence[str]
) -> tuple[jax.Array, ...]:
    rows = p.bq * p.nq
    out = _pad(p._flat(saved["out"]).astype(p.acc), 1, rows)
    dout = _pad(p._flat(saved["dout"]).astype(p.acc), 1, rows)
    lse = _pad(p._flat(saved["lse"]).astype(p.acc), 2, rows, -jnp.inf)
    dlse = _pad(p._flat(saved["dlse"]).astype(p.acc), 2, rows)
    has_key = lse > -jnp.inf
    dout = jnp.where(jnp.swapaxes(has_key, 1, 2)[..., None], dout, 0)
    delta = jnp.where(has_key, jnp.swapaxes((dout * out).sum(-1), 1, 2) - dlse, 0)

    def q_block(carry: Any, i0: jax.Array) -> tuple[Any, jax.Array]:
        lse_b = lax.dynamic_slice_in_dim(lse, i0, p.bq, 2)[..., None]
        delta_b = lax.dynamic_slice_in_dim(delta, i0, p.bq, 2)[..., None]
        dout_b = lax.dynamic_slice_in_dim(dout, i0, p.bq, 1)
        dout_b = dout_b.reshape(p.B, p.bq, p.K, p.G, p.Hv)

        def kv_block(carry: Any, j0: jax.Array) -> tuple[Any, None]:
            dq, dv, total = carry
            live = p.live(i0, j0)
            s, pull = jax.vjp(lambda x: p.scores(x, i0, j0, live), p.block(i0, j0))
            is_live = live & (lse_b > -jnp.inf)
            e = jnp.exp(jnp.where(is_live, s - jnp.where(is_live, lse_b, 0), -jnp.inf))
            v = lax.dynamic_slice_in_dim(p.v, j0, p.bk, 1)
            dp = jnp.einsum("bikgd,bjkd->bkgij", dout_b, v, precision=p.precision)
            ds = jnp.where(is_live, e * (dp.reshape(s.shape) - delta_b), 0)
            g: _Block = pull(ds)[0]
            grouped = e.reshape(p.B, p.K, p.G, p.bq, p.bk)
            dv_b = jnp.einsum(
                "bkgij,bikgd->bjkd", grouped, dout_b, precision=p.precision
            )
            total = _Block(
                q=total.q,
                k=_add_at(total.k, g.k, j0, 1),
                scale=total.scale + g.scale,
                bias=_add_bias(total.bias, g.bias, i0, j0),
                captures=[
                    a + b for a, b in zip(total.captures, g.captures, strict=True)
                ],
            )
            return (dq + g.q, _add_at(dv, dv_b, j0, 1), total), None

        dv, total = carry
        dq = jnp.zeros((p.B, p.bq, p.N, p.H), p.acc)
        (dq, dv, total), _ = lax.scan(
            jax.checkpoint(kv_block), (dq, dv, total), _starts(p.nk, p.bk)
        )
        return (dv, total), dq

    floats = [c for c in p.score_captures if _is_float(c)]
    start = _Block(
        q=jnp.zeros((), p.acc),
        k=jnp.zeros_like(p.k),
        scale=jnp.zeros((), p.acc),
        bias=None if p.bias is None else jnp.zeros_like(p.bias),
        captures=[jnp.zeros(c.shape, gradient_dtype(c.dtype)) for c in floats],
    )
    (dv, total), dq = lax.scan(
        q_block, (jnp.zeros_like(p.v), start), _starts(p.nq, p.bq)
    )
    dq = jnp.moveaxis(dq, 0, 1).reshape(p.B, rows, p.N, p.H)[:, : p.T]
    by_role = {
        "query": dq.astype(p.dtype).reshape(*p.batch_shape, p.T, p.N, p.H),
        "key": total.k[:, : p.S].astype(p.dtype).reshape(*p.batch_shape, p.S, p.K, p.H),
        "value": dv[:, : p.S].astype(p.dtype).reshape(*p.batch_shape, p.S, p.K, p.Hv),
        "scale": total.scale,
    }
    if "bias" in results:
        assert p.bias_shape is not None
        # `_bias` is linear, so its transpose sums over broadcast axes and drops the
        # padding.
        shape = jax.ShapeDtypeStruct(p.bias_shape, p.acc)
        (by_role["bias"],) = jax.linear_transpose(p._bias, shape)(total.bias)
    grads = iter(total.captures)
    for k, c in enumerate(p.score_captures):
        if _is_float(c):
            by_role[f"capture.{k}"] = next(grads).astype(p.acc)
    return tuple(by_role[role] for role in results)


def gradient_dtype(dtype: Any) -> Any:
    """float32, or float64 for float64: in which the gradients of a captured array add
    up, and in which those of a call with such a query leave the primitive."""
    return np.dtype(np.float64 if dtype == jnp.float64 else np.float32)


def _add_at(total: jax.Array, x: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    old = lax.dynamic_slice_in_dim(total, start, x.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + x, start, axis)


def _add_bias(
    total: jax.Array | None, x: jax.Array | None, i0: jax.Array, j0: jax.Array
) -> jax.Array | None:
    if total is None or x is None:
        return None
    starts = [0, 0, i0 if total.shape[2] != 1 else 0, j0 if total.shape[3] != 1 else 0]
    old = lax.dynamic_slice(total, starts, x.shape)
    return lax.dynamic_update_slice(total, old + x, starts)
