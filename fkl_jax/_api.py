"""`attention`: the one public call, its arguments and the way from them to a spec and
operands."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import _backends, _compose, _validate, _vjp
from ._block_mask import BlockMask
from ._compose import MaskModLike, ScoreModLike
from ._mask_mods import Causal, MaskMod
from ._score_mods import CallSizes
from ._spec import AttentionSpec, interned_spec

Implementation = Literal["ffi", "xla"] | None
CausalLike = bool | Literal["top_left", "bottom_right"]
PrecisionLike = jax.lax.Precision | str | None


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
    mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
    block_mask: BlockMask | None = None,
    bias: ArrayLike | None = None,
    causal: CausalLike = False,
    scale: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_seq_lengths: ArrayLike | None = None,
    kv_seq_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    kv_offset: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Any:
    r"""Compute softmax attention whose scores and masks are programmed in Python.

    In this order, in float32 (float64 for float64 inputs):

    .. math::
        s_{ij} &= scale \cdot q_i \cdot k_j + bias_{ij} \\
        s_{ij} &= score\_mod(s_{ij}, b, h, q\_idx, kv\_idx) \\
        lse_i &= \log \sum_{j\ live} e^{s_{ij}} \\
        out_i &= \sum_{j\ live} e^{s_{ij} - lse_i} v_j

    An element is live if every mask source says so. Letters: `*B` any number of batch
    axes, `T` and `S` query and key length, `N` and `K` query and key/value heads (`N %
    K == 0`, query head h reads key/value head `h // (N // K)`), `H` and `Hv` head dims
    of query/key and of value.

    Args:
        query: (*B, T, N, H); float32, bfloat16, float16 or float64.
        key: (*B, S, K, H), query's dtype.
        value: (*B, S, K, Hv), query's dtype.
        score_mod: a `ScoreMod`, a function `(s, b, h, q_idx, kv_idx) -> s` of scalars,
            or a tuple of those applied from left to right; a `MaskMod` in it acts as a
            mask. Functions are written in jax.numpy and may close over arrays. Indices
            are global: `b` counts the flattened `*B`, `q_idx = i + q_offset`, `kv_idx
            = j + kv_offset`.
        mask_mod: a `MaskMod`, a function `(b, h, q_idx, kv_idx) -> bool`, or a tuple
            of those, all of which must hold.
        block_mask: a `BlockMask`; its dead blocks cost nothing.
        bias: float, broadcastable to (*B, N, T, S); added before the score mods;
            differentiable.
        causal: False; True (needs T == S or an explicit offset: live iff `kv_idx <=
            q_idx`); "top_left" (`j <= i`); "bottom_right" (`j <= i + S - T`).
        scale: any finite number or traced scalar, 0 and negative ones too; None is `1
            / sqrt(H)`; differentiable.
        q_segment_ids, kv_segment_ids: int (*B, T) and (*B, S), both or none: live iff
            equal and not negative.
        q_seq_lengths, kv_seq_lengths: int (*B,): query rows at or beyond are dead rows
            (out 0, lse -inf), keys at or beyond are dead keys.
        q_offset, kv_offset: int scalar or (*B,), may be traced; position of the first
            query and key; None is 0.
        sinks: float (N,): an extra logit per query head that takes probability and
            gives no value; differentiable.
        return_lse: also return the log-sum-exp.
        deterministic: gradients are bitwise repeatable (the forward always is).
        precision: of the products, as for `jax.lax.dot`; None follows
            `jax_default_matmul_precision`.
        implementation: "ffi" (compiled kernels), "xla" (plain JAX), or None: compiled
            kernels where they can take the call, plain JAX otherwise, with one warning
            that says why.

    Returns:
        out (*B, T, N, Hv) in query's dtype; with `return_lse` also lse (*B, N, T),
        natural logarithm, float32 (float64 for float64 inputs). A row without a live
        key has out exactly 0 and lse -inf (with sinks: the sink).

    Raises:
        ValueError: a wrong shape, value or combination.
        TypeError: a wrong kind or dtype.
        NotImplementedError: `implementation="ffi"` for a call that no kernel takes; it
            names the reason.

    Notes:
        Changing a value (of a mod's parameter, a mask, an offset, a length, the scale)
        never compiles anything. Gradients flow to query, key, value, bias, scale,
        sinks, and every float parameter and captured array of a score mod. They are
        reverse mode to any order; forward mode needs `implementation="xla"`. Residuals
        are the operands, out and lse; the last two carry the checkpoint names
        "fkl_out" and "fkl_lse". Memory beyond operands and results is O(T + S).

    Source: Dao et al., "FlashAttention" (2022); the contract is docs/semantics.md.

    Example:
        >>> alibi = lambda s, b, h, q_idx, kv_idx: s - slopes[h] * (q_idx - kv_idx)
        >>> out = attention(q, k, v, causal=True, score_mod=alibi)
    """
    call = resolve(
        query,
        key,
        value,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        bias=bias,
        causal=causal,
        scale=scale,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_seq_lengths=q_seq_lengths,
        kv_seq_lengths=kv_seq_lengths,
        q_offset=q_offset,
        kv_offset=kv_offset,
        sinks=sinks,
        deterministic=deterministic,
        precision=precision,
    )
    return run(call, return_lse=return_lse, implementation=implementation)


def attention_with_lse(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Return `attention(query, key, value, return_lse=True, ...)`: out and lse.

    Args:
        query, key, value: as for `attention`.
        options: every keyword of `attention` but `return_lse`.

    Returns:
        out (*B, T, N, Hv) and lse (*B, N, T), natural logarithm, float32, -inf on rows
        without a live key.

    Raises:
        TypeError: `return_lse` is among the options; otherwise as `attention`.
    """
    if "return_lse" in options:
        raise TypeError(
            "attention_with_lse always returns lse; drop return_lse, or call attention."
        )
    return attention(query, key, value, return_lse=True, **options)


class Call(NamedTuple):
    """A checked call.

    Attributes:
        spec: what selects the code; its operands are the following two, in order.
        operands: by role.
        implied: types of operands that `_vjp.implied_operands` makes, by role.
        masks: `causal` and all mask mods, as they were given.
    """

    spec: AttentionSpec
    operands: dict[str, Any]
    implied: dict[str, jax.ShapeDtypeStruct]
    masks: list[MaskMod]


def resolve(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    bias: Any = None,
    causal: Any = False,
    scale: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    q_seq_lengths: Any = None,
    kv_seq_lengths: Any = None,
    q_offset: Any = None,
    kv_offset: Any = None,
    sinks: Any = None,
    deterministic: bool = False,
    precision: PrecisionLike = None,
    sequence_shards: int = 1,
    head_shards: int = 1,
    first_head: Any = 0,
) -> Call:
    """Check the arguments of `attention` and turn them into a spec and operands.

    The arrays may be a part of a larger call: one of `sequence_shards` equal parts of
    its queries and keys, or one of `head_shards` of its heads, from `first_head` on.
    Mods and `causal` mean the larger call; bias and block mask have the rows of the
    part and the columns of the whole.
    """
    query = _validate.as_array(query, "query")
    key = _validate.as_array(key, "key")
    value = _validate.as_array(value, "value")
    _validate.check_qkv(query, key, value)
    if isinstance(causal, np.bool_):
        causal = bool(causal)
    _validate.check_choice(causal, "causal", _validate.CAUSAL)
    _validate.check_bool(deterministic, "deterministic")

    batch = query.shape[:-3]
    t, n, h = query.shape[-3:]
    s = key.shape[-3]
    q_len, kv_len = sequence_shards * t, sequence_shards * s
    acc = np.float64 if query.dtype == np.float64 else np.float32
    operands: dict[str, Any] = {"query": query, "key": key, "value": value}
    if scale is not None:
        operands["scale"] = _validate.check_scale(scale, acc)
    if bias is not None:
        array = _validate.check_bias(
            _validate.as_array(bias, "bias"), (*batch, n, t, kv_len)
        )
        # float64 beside float32 inputs: the kernels read at most float32.
        operands["bias"] = array.astype(acc) if array.dtype == np.float64 else array
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise _validate.half_of_segment_ids(q_segment_ids is None)
    if q_segment_ids is not None:
        operands["q_segment_ids"], operands["kv_segment_ids"] = (
            _validate.check_segment_ids(q_segment_ids, kv_segment_ids, batch, t, s)
        )
    for name, lengths in (
        ("q_seq_lengths", q_seq_lengths),
        ("kv_seq_lengths", kv_seq_lengths),
    ):
        if lengths is not None:
            operands[name] = _validate.check_lengths(lengths, name, batch)
    for name, offset in (("q_offset", q_offset), ("kv_offset", kv_offset)):
        if offset is not None:
            operands[name] = _validate.check_offset(offset, name, batch)
    if sinks is not None:
        operands["sinks"] = _validate.check_sinks(sinks, n, acc)
    blocks = (0, 0)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"attention: block_mask is a {type(block_mask).__name__}; wrap the "
                "array in BlockMask(mask, block_q, "
                "block_kv)."
            )
        blocks = (block_mask.block_q, block_mask.block_kv)
        operands["block_mask"] = _validate.check_block_mask(
            block_mask.mask, blocks, batch, n, t, kv_len
        )

    scores, masks = _compose.split_mods(score_mod, mask_mod)
    if causal is not False:
        has_offset = q_offset is not None or kv_offset is not None
        if causal is True and q_len != kv_len and not has_offset:
            raise _validate.ambiguous_causal(q_len, kv_len)
        if isinstance(causal, str) and has_offset:
            raise _validate.causal_with_offsets(causal)
        masks.insert(
            0,
            _compose.bottom_right(q_len, kv_len)
            if causal == "bottom_right"
            else _CAUSAL,
        )
    sizes = CallSizes(
        batch=math.prod(batch),
        num_q_heads=head_shards * n,
        q_seq_len=q_len,
        kv_seq_len=kv_len,
        has_offsets=q_offset is not None or kv_offset is not None,
    )
    for mod in (*scores, *masks):
        mod.check_call(sizes)
    score, score_captures = _compose.trace_scores(scores, acc)
    mask, mask_captures = _compose.trace_masks(masks)
    if mask is not None:
        mask = mask.with_captures_from(len(score_captures))
    captures = [
        c if isinstance(c, jax.Array) else jnp.asarray(c)
        for c in (*score_captures, *mask_captures)
    ]
    operands.update({f"capture.{k}": c for k, c in enumerate(captures)})
    # What shapes alone say is made inside the compiled program: an eager call does not
    # dispatch it. Iotas rather than constants inside a kernel: they shard like the
    # batch and the heads, and stay global.
    mods = [m for m in (score, mask) if m is not None]
    implied = {}
    if scale is None:
        implied["scale"] = jax.ShapeDtypeStruct((), acc)
    if any(m.reads("b") for m in mods):
        implied["batch_index"] = jax.ShapeDtypeStruct(batch, jnp.int32)
    if any(m.reads("h") for m in mods):
        if head_shards == 1:
            implied["head_index"] = jax.ShapeDtypeStruct((n,), jnp.int32)
        else:
            heads = jnp.arange(n, dtype=jnp.int32)
            operands["head_index"] = first_head + heads

    spec = interned_spec(
        operands=(*operands, *implied),
        num_batch_dims=len(batch),
        score=score,
        mask=mask,
        num_score_captures=len(score_captures),
        capture_ndims=tuple(c.ndim for c in captures),
        block_q=blocks[0],
        block_kv=blocks[1],
        deterministic=deterministic,
        precision=_precision(precision),
    )
    return Call(spec, operands, implied, masks)


def run(call: Call, *, return_lse: bool, implementation: Implementation) -> Any:
    """Return out, and lse if asked for, of a call."""
    _validate.check_choice(implementation, "implementation", _validate.IMPLEMENTATIONS)
    _validate.check_bool(return_lse, "return_lse")
    every = call.operands | call.implied
    chosen = _backends.choose(call.spec, every, implementation)
    compute = _vjp.compiled_attention if chosen == "ffi" else _vjp.reference_attention
    out, lse = compute(call.spec, tuple(call.implied))(*call.operands.values())
    return (out, lse) if return_lse else out


# --- private -------------------------------------------------------------------------


_CAUSAL = Causal()
_PRECISIONS = {
    None: "default",
    "default": "default",
    "fastest": "default",
    "bfloat16": "default",
    "tensorfloat32": "high",
    "high": "high",
    "bfloat16_3x": "high",
    "highest": "highest",
    "float32": "highest",
}


def _precision(value: PrecisionLike) -> str:
    if value is None:
        value = getattr(jax.config, "jax_default_matmul_precision", None)
    if isinstance(value, jax.lax.Precision):
        value = value.name.lower()
    word = value.lower() if isinstance(value, str) else value
    if word not in _PRECISIONS:
        allowed = ", ".join(repr(k) for k in _PRECISIONS if k)
        raise ValueError(
            f"attention: precision is {value!r}; it must be None, a jax.lax.Precision "
            f"or one of {allowed}."
        )
    return _PRECISIONS[word]
