"""Attention for Flax: `attention_fn` for the layers that NNX and Linen have, and
`GroupedQueryAttention`, a layer for NNX.

Needs Flax, which `import fkl_jax` never imports: `pip install "fkl_jax[flax]"`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

try:
    from flax import linen, nnx
except ModuleNotFoundError as e:
    if e.name != "flax":
        raise
    raise ModuleNotFoundError(
        'fkl_jax.flax needs Flax, which is not installed: pip install "fkl_jax[flax]".',
        name="flax",
    ) from e

from . import _layers
from ._api import Implementation, attention
from ._block_mask import BlockMask
from ._compose import MaskModLike, ScoreModLike
from ._layers import Window

_Precision = Any  # of Flax: also a pair of precisions
_lecun_normal = jax.nn.initializers.lecun_normal()


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: _Precision = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
    mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
    block_mask: BlockMask | None = None,
    scale: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Compute attention where Flax asks for an `attention_fn`.

    For `flax.nnx.MultiHeadAttention(attention_fn=...)` and `flax.linen`'s
    `MultiHeadDotProductAttention`; the arguments up to `attn_weights_value_einsum` are
    theirs. The others program the scores; bind them with `functools.partial`.

    Args:
        query: (*B, T, N, H).
        key: (*B, S, K, H); N is a multiple of K.
        value: (*B, S, K, Hv).
        bias: float, broadcastable to (*B, N, T, S).
        mask: bool, or any number with non-zero = attend, as `make_causal_mask` and
            `make_attention_mask` give it; broadcastable to (*B, N, T, S). It is read
            element by element: `is_causal` and mask mods skip dead tiles, it does not.
        broadcast_dropout, dropout_rng: of dropout, which is not done here.
        dropout_rate: must be 0 unless `deterministic`.
        deterministic: no dropout.
        dtype: of the computation and the result; None is the common dtype of query,
            key and value.
        precision: of the products, as for `fkl_jax.attention`; a pair must be of two
            equal ones.
        module: a module that the attention weights are sown into, as Flax does for
            `sow_weights=True`: computed beside the result, a whole (*B, N, T, S) array.
        is_causal: live iff `j <= i`, counted from the first query and key.
        force_fp32_for_softmax: the softmax is float32 in any case.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be
            None, there is no einsum to replace.
        score_mod, mask_mod, block_mask, scale, implementation: as for
            `fkl_jax.attention`.

    Returns:
        (*B, T, N, Hv) in `dtype`. Rows without a live key are 0 (Flax: the mean of all
        values).

    Raises:
        NotImplementedError: dropout, or another einsum.
        ValueError, TypeError: as `fkl_jax.attention`.

    Example:
        >>> layer = nnx.MultiHeadAttention(
        ...     8, 64, decode=False, rngs=nnx.Rngs(0),
        ...     attention_fn=partial(attention_fn, score_mod=SoftCap(30.0)))
    """
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            f"fkl_jax.flax: dropout_rate is {dropout_rate} outside deterministic mode; "
            "there is no dropout inside fused attention. Set it to 0, or pass "
            "deterministic=True."
        )
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(
                f"fkl_jax.flax: {name} is {einsum!r}; fused attention has no einsum to "
                "replace. Pass None."
            )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    scores, masks = _layers.own_mods(score_mod, mask_mod)
    if mask is not None:
        dense = _layers.broadcast_mask(mask, query, key.shape[-3], "fkl_jax.flax")
        masks = (*masks, dense)
    options: dict[str, Any] = dict(
        score_mod=scores,
        mask_mod=masks,
        block_mask=block_mask,
        bias=bias,
        causal="top_left" if is_causal else False,
        scale=scale,
        precision=_one_precision(precision),
    )
    if module is not None:
        _sow_weights(module, query, key, options)
    return attention(query, key, value, implementation=implementation, **options)


class GroupedQueryAttention(nnx.Module):
    """Self-attention with fewer key/value heads, rotary positions, mods and a cache.

    Sizes: `*B` any number of batch axes, `T` tokens, `N` query heads, `K` key/value
    heads, `H` head dim.

    Args:
        in_features: width of the input.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None is N.
        head_dim: H; None is `in_features // num_heads`.
        out_features: width of the output; None is `in_features`.
        rope_base: base of the rotary positions' wavelengths; None has no rotary
            positions.
        causal: a token sees none after it.
        window: w sees the last w tokens, its own included; a pair is (left, right) of
            `SlidingWindow`.
        soft_cap: scores are capped by `SoftCap`, after `score_mod`.
        score_mod, mask_mod: as for `fkl_jax.attention`; `q_idx` and `kv_idx` are
            positions in the sequence, in decoding too. Arrays in them are part of the
            layer's state and not trained; a mod made of parameters goes into the call.
        scale: of the scores; None is `1 / sqrt(H)`.
        use_bias: of the four projections.
        use_sinks: learn an extra logit for each query head.
        dtype: of the computation; None follows the input and the parameters.
        param_dtype: of the parameters.
        precision: of all products.
        kernel_init, bias_init: initializers of the projections.
        decode: default of the call's `decode`.
        implementation: as for `fkl_jax.attention`.
        rngs: of the initializers.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> layer = GroupedQueryAttention(
        ...     256, num_heads=8, num_kv_heads=2, window=128, rngs=nnx.Rngs(0))
        >>> y = layer(x)                                  # (*B, T, 256)
        >>> layer.init_cache((*B, 1024, 256))
        >>> y = layer(prompt, decode=True)                # any number of tokens
        >>> y = layer(next_token, decode=True)            # (*B, 1, 256)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        out_features: int | None = None,
        rope_base: float | None = 10_000.0,
        causal: bool = True,
        window: Window = None,
        soft_cap: float | None = None,
        score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
        mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
        scale: float | None = None,
        use_bias: bool = False,
        use_sinks: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: _Precision = None,
        kernel_init: Callable[..., Any] = _lecun_normal,
        bias_init: Callable[..., Any] = jax.nn.initializers.zeros,
        decode: bool = False,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None:
            head_dim = _layers.split_head_dim(in_features, num_heads)
        _layers.check_heads(num_heads, num_kv_heads, head_dim, rope_base is not None)
        self.in_features = in_features
        self.out_features = in_features if out_features is None else out_features
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.rope_base = rope_base
        self.causal = causal
        self.scale = scale
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.decode = decode
        self.implementation = implementation
        _layers.limits(window, soft_cap)  # raises what is wrong with them here
        self.window, self.soft_cap = window, soft_cap
        scores, masks = _layers.own_mods(score_mod, mask_mod)
        self.score_mods, self.mask_mods = nnx.data(scores), nnx.data(masks)

        def projection(in_features: Any, out_features: Any, axis: Any = -1) -> Any:
            return nnx.LinearGeneral(
                in_features,
                out_features,
                axis=axis,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                precision=precision,
                kernel_init=kernel_init,
                bias_init=bias_init,
                rngs=rngs,
            )

        self.query = projection(in_features, (num_heads, head_dim))
        self.key = projection(in_features, (num_kv_heads, head_dim))
        self.value = projection(in_features, (num_kv_heads, head_dim))
        self.out = projection((num_heads, head_dim), self.out_features, (-2, -1))
        self.sinks = nnx.data(
            nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None
        )
        self.cached_key = nnx.data(None)
        self.cached_value = nnx.data(None)
        self.cache_index = nnx.data(None)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
        mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
        decode: bool | None = None,
    ) -> jax.Array:
        """Attend within `inputs`, or, in decoding, to the cache and `inputs`.

        Args:
            inputs: (*B, T, in_features).
            positions: (*B, T) or (T,), of the rotary positions only; None counts from
                0, in decoding from the number of tokens in the cache.
            segment_ids: int (*B, T): tokens of different or negative ids do not see
                each other. Not in decoding.
            lengths: int (*B,): how many of the T tokens count; the attention of the
                others is 0 and they are not kept in the cache.
            score_mod, mask_mod: for this call; score mods come before the layer's.
            decode: append `inputs` to the cache of `init_cache` and attend to it; None
                is the layer's `decode`.

        Returns:
            (*B, T, out_features).

        Raises:
            ValueError: no cache, one that is too short (if that is known only when a
                compiled function runs, the result is NaN), or segment ids in decoding.
        """
        decode = self.decode if decode is None else decode
        if decode:
            self._check_decoding(inputs, segment_ids)
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        if self.rope_base is not None:
            if positions is None:
                positions = jnp.arange(inputs.shape[-2])
                if decode:
                    positions = self.cache_index[...][..., None] + positions
            positions = jnp.asarray(positions)
            query = _layers.rotate(query, positions, self.rope_base)
            key = _layers.rotate(key, positions, self.rope_base)
        options: dict[str, Any] = dict(
            causal=self.causal,
            scale=self.scale,
            sinks=None if self.sinks is None else self.sinks[...],
            precision=_one_precision(self.precision),
            implementation=self.implementation,
            **_layers.joined(
                _layers.own_mods(score_mod, mask_mod),
                (self.score_mods, self.mask_mods),
                _layers.limits(self.window, self.soft_cap),
            ),
        )
        if decode:
            out = self._decode(query, key, value, lengths, options)
        else:
            out = attention(
                query,
                key,
                value,
                q_segment_ids=segment_ids,
                kv_segment_ids=segment_ids,
                q_seq_lengths=lengths,
                kv_seq_lengths=lengths,
                **options,
            )
        return self.out(out)

    def init_cache(
        self, input_shape: Sequence[int], dtype: DTypeLike | None = None
    ) -> None:
        """Make an empty cache, or empty the one that is there.

        Args:
            input_shape: (*B, S, in_features), S being the most tokens it can hold.
            dtype: of the cache; None is the layer's `dtype` or `param_dtype`.
        """
        dtype = dtype or self.dtype or self.param_dtype
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros(shape[:-3], jnp.int32))

    def _check_decoding(self, inputs: jax.Array, segment_ids: Any) -> None:
        if self.cache_index is None:
            raise ValueError(
                "fkl_jax.flax: decode is True but there is no cache; call init_cache "
                "first."
            )
        if segment_ids is not None:
            raise ValueError(
                "fkl_jax.flax: segment_ids in decoding; the cache holds one sequence "
                "for each batch element. Leave them out."
            )
        batch = self.cache_index.shape
        if inputs.shape[:-2] != batch:
            raise ValueError(
                f"fkl_jax.flax: inputs have batch axes {inputs.shape[:-2]}, the cache "
                f"has {batch}; call init_cache for these."
            )

    def _decode(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        lengths: ArrayLike | None,
        options: dict[str, Any],
    ) -> Any:
        index = self.cache_index[...]
        max_length = self.cached_key.shape[-3]
        count = key.shape[-3] if lengths is None else jnp.asarray(lengths)
        _layers.check_room(index, count, max_length, "fkl_jax.flax")
        keys = _layers.append(self.cached_key[...], key, index)
        values = _layers.append(self.cached_value[...], value, index)
        out = _layers.cached_attention(query, keys, values, index, lengths, **options)
        # Only now: a call that raises leaves the cache as it was.
        self.cached_key[...] = keys
        self.cached_value[...] = values
        self.cache_index[...] = index + count
        return out


# --- private -------------------------------------------------------------------------


def _one_precision(precision: _Precision) -> Any:
    if isinstance(precision, tuple) and len(set(precision)) == 1:
        return precision[0]
    return precision


def _sow_weights(
    module: Any, query: jax.Array, key: jax.Array, options: dict[str, Any]
) -> None:
    """Sow the attention weights: what the output is for one-hot values."""
    *batch, s, num_kv_heads, _ = key.shape
    one_hot = jnp.eye(s, dtype=key.dtype)[:, None, :]
    one_hot = jnp.broadcast_to(one_hot, (*batch, s, num_kv_heads, s))
    # A value head dim of S is beyond what the kernels take.
    weights = attention(query, key, one_hot, implementation="xla", **options)
    weights = jnp.swapaxes(weights, -3, -2)
    if isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        module.sow(nnx.Intermediate, "attention_weights", weights)
