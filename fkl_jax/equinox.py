"""Attention layers for Equinox: `MultiheadAttention`, in the place of `equinox.nn`'s,
and `GroupedQueryAttention` with a key/value cache.

Both take one sequence, as Equinox layers do; `jax.vmap` makes it a batch. Needs
Equinox, which `import fkl_jax` never imports: `pip install "fkl_jax[equinox]"`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

try:
    import equinox as eqx
except ModuleNotFoundError as e:
    if e.name != "equinox":
        raise
    raise ModuleNotFoundError(
        "fkl_jax.equinox needs Equinox, which is not installed: pip install "
        '"fkl_jax[equinox]".',
        name="equinox",
    ) from e

from . import _layers
from ._api import Implementation, PrecisionLike, attention
from ._compose import MaskModLike, ScoreModLike
from ._layers import Mods, Window


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` computed by `fkl_jax.attention`.

    The constructor and the parameters are Equinox's, so that `eqx.tree_at`,
    serialisation and code that builds the layer stay as they are.

    Notes:
        Attention dropout is not done: with `dropout_p` above 0 the layer works in
        inference mode only. Rows that see no key give 0 before the output projection
        (Equinox: the mean of all values).
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Any] | None = None,
        score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
        mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
        causal: bool = False,
        implementation: Implementation = None,
    ) -> jax.Array:
        """Attend; the arguments up to `process_heads` are Equinox's.

        Args:
            query: (T, query_size).
            key_: (S, key_size).
            value: (S, value_size).
            mask: bool, (T, S) or (num_heads, T, S); True = attend.
            key: of dropout, which is not done.
            inference: as in Equinox; None is what the layer was made or set to.
            deterministic: deprecated by Equinox in favour of `inference`.
            process_heads: maps the three arrays (T|S, num_heads, size) to three of the
                same shapes, for example by rotary positions.
            score_mod, mask_mod, causal, implementation: as for `fkl_jax.attention`;
                under `vmap`, `b` stays 0.

        Returns:
            (T, output_size).

        Raises:
            NotImplementedError: dropout outside inference mode.
            ValueError, TypeError: as in Equinox and `fkl_jax.attention`.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "fkl_jax.equinox: deterministic is deprecated in favour of inference.",
                stacklevel=2,
            )
        self._check_no_dropout(inference)
        if key_.shape[0] != value.shape[0]:
            raise ValueError(
                f"fkl_jax.equinox: key_ has length {key_.shape[0]}, value has "
                f"{value.shape[0]}; they must match."
            )
        heads = tuple(
            jax.vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1)
            for projection, x in (
                (self.query_proj, query),
                (self.key_proj, key_),
                (self.value_proj, value),
            )
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    "fkl_jax.equinox: process_heads changed the shapes of the heads "
                    f"from {shapes} to {[x.shape for x in heads]}; they must stay."
                )
        scores, masks = _layers.own_mods(score_mod, mask_mod)
        if mask is not None:
            t, s = query.shape[0], key_.shape[0]
            if mask.shape not in ((t, s), (self.num_heads, t, s)):
                raise ValueError(
                    f"fkl_jax.equinox: mask has shape {mask.shape}; it must be "
                    f"(query length, key length) = {(t, s)}, or that for each of "
                    f"{self.num_heads} heads."
                )
            dense = _layers.broadcast_mask(mask, heads[0], s, "fkl_jax.equinox")
            masks = (*masks, dense)
        out = attention(
            *heads,
            score_mod=scores,
            mask_mod=masks,
            causal=causal,
            implementation=implementation,
        )
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))

    def _check_no_dropout(self, inference: bool | None) -> None:
        p = self.dropout.p
        inference = self.dropout.inference if inference is None else inference
        if not inference and not (isinstance(p, int | float) and p == 0):
            raise NotImplementedError(
                f"fkl_jax.equinox: dropout_p is {p} outside inference mode; there is "
                "no dropout inside fused attention. Set it to 0, or pass "
                "inference=True."
            )


class KVCache(eqx.Module):
    """Keys and values of one sequence so far, of `GroupedQueryAttention.init_cache`.

    Attributes:
        key, value: (S, K, H), the rows from `index` on unused.
        index: int32 scalar, tokens in the cache.
    """

    key: jax.Array
    value: jax.Array
    index: jax.Array


class GroupedQueryAttention(eqx.Module):
    """Self-attention with fewer key/value heads, rotary positions, mods and a cache.

    Args:
        query_size: width of the input.
        num_heads: N.
        num_kv_heads: K, a divisor of N; None is N.
        head_dim: H; None is `query_size // num_heads`.
        output_size: width of the output; None is `query_size`.
        rope_base: base of the rotary positions' wavelengths; None has no rotary
            positions.
        causal: a token sees none after it.
        window: w sees the last w tokens, its own included; a pair is (left, right) of
            `SlidingWindow`.
        soft_cap: scores are capped by `SoftCap`, after `score_mod`; not trained.
        score_mod, mask_mod: as for `fkl_jax.attention`; `q_idx` and `kv_idx` are
            positions in the sequence, in decoding too, and `b` stays 0 under `vmap`.
            Parameters of a `ScoreMod` are arrays of the layer and trained like others.
        scale: of the scores; None is `1 / sqrt(H)`.
        use_bias: of the four projections.
        use_sinks: learn an extra logit for each query head.
        precision: of the products in the attention.
        implementation: as for `fkl_jax.attention`.
        dtype: of the parameters; None is JAX's default float.
        key: of the initialisation.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> layer = GroupedQueryAttention(256, 8, 2, window=128, key=jax.random.key(0))
        >>> y = jax.vmap(layer)(x)                        # x: (B, T, 256)
        >>> cache = layer.init_cache(1024)
        >>> y, cache = layer(prompt, cache=cache)         # (T, 256), any T
        >>> y, cache = layer(next_token, cache=cache)     # (1, 256)
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    sinks: jax.Array | None
    mods: Mods

    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    rope_base: float | None = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: Window = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    precision: PrecisionLike = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        query_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        output_size: int | None = None,
        rope_base: float | None = 10_000.0,
        causal: bool = True,
        window: Window = None,
        soft_cap: float | None = None,
        score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
        mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
        scale: float | None = None,
        use_bias: bool = False,
        use_sinks: bool = False,
        precision: PrecisionLike = None,
        implementation: Implementation = None,
        dtype: DTypeLike | None = None,
        key: jax.Array,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None:
            head_dim = _layers.split_head_dim(query_size, num_heads)
        _layers.check_heads(num_heads, num_kv_heads, head_dim, rope_base is not None)
        keys = jax.random.split(key, 4)

        def linear(in_size: int, out_size: int, key: jax.Array) -> Any:
            return eqx.nn.Linear(in_size, out_size, use_bias, dtype, key=key)

        self.query_proj = linear(query_size, num_heads * head_dim, keys[0])
        self.key_proj = linear(query_size, num_kv_heads * head_dim, keys[1])
        self.value_proj = linear(query_size, num_kv_heads * head_dim, keys[2])
        self.output_proj = linear(
            num_heads * head_dim,
            query_size if output_size is None else output_size,
            keys[3],
        )
        self.sinks = (
            jnp.zeros(num_heads, self.query_proj.weight.dtype) if use_sinks else None
        )
        self.mods = _layers.own_mods(score_mod, mask_mod)
        _layers.limits(window, soft_cap)  # raises what is wrong with them here
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.rope_base = rope_base
        self.causal = causal
        self.window = window
        self.soft_cap = soft_cap
        self.scale = scale
        self.precision = precision
        self.implementation = implementation

    def __call__(
        self,
        inputs: jax.Array,
        *,
        cache: KVCache | None = None,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        length: ArrayLike | None = None,
        score_mod: ScoreModLike | Sequence[ScoreModLike] | None = None,
        mask_mod: MaskModLike | Sequence[MaskModLike] | None = None,
        key: jax.Array | None = None,
    ) -> Any:
        """Attend within `inputs`, or to a cache and `inputs`.

        Args:
            inputs: (T, query_size).
            cache: of the tokens before these; they are appended to it.
            positions: (T,), of the rotary positions only; None counts from 0, with a
                cache from the number of tokens in it.
            segment_ids: int (T,): tokens of different or negative ids do not see each
                other. Not with a cache.
            length: int scalar: how many of the T tokens count; the attention of the
                others is 0 and they are not kept in the cache.
            score_mod, mask_mod: for this call; score mods come before the layer's.
            key: ignored, for `equinox.nn.Sequential`.

        Returns:
            (T, output_size); with a cache also the cache with the new tokens.

        Raises:
            ValueError: the cache is too short (if that is known only when a compiled
                function runs, the result is NaN), or segment ids with a cache.
        """
        t = inputs.shape[0]
        query, new_key, value = (
            jax.vmap(projection)(inputs).reshape(t, -1, self.head_dim)
            for projection in (self.query_proj, self.key_proj, self.value_proj)
        )
        if self.rope_base is not None:
            if positions is None:
                positions = jnp.arange(t)
                if cache is not None:
                    positions = cache.index + positions
            positions = jnp.asarray(positions)
            query = _layers.rotate(query, positions, self.rope_base)
            new_key = _layers.rotate(new_key, positions, self.rope_base)
        options: dict[str, Any] = dict(
            causal=self.causal,
            scale=self.scale,
            sinks=self.sinks,
            precision=self.precision,
            implementation=self.implementation,
            **_layers.joined(
                _layers.own_mods(score_mod, mask_mod),
                self.mods,
                _layers.limits(self.window, self.soft_cap),
            ),
        )
        if cache is None:
            out = attention(
                query,
                new_key,
                value,
                q_segment_ids=segment_ids,
                kv_segment_ids=segment_ids,
                q_seq_lengths=length,
                kv_seq_lengths=length,
                **options,
            )
            return jax.vmap(self.output_proj)(out.reshape(t, -1))
        if segment_ids is not None:
            raise ValueError(
                "fkl_jax.equinox: segment_ids with a cache, which holds one sequence. "
                "Leave them out."
            )
        count = t if length is None else jnp.asarray(length)
        _layers.check_room(cache.index, count, cache.key.shape[0], "fkl_jax.equinox")
        rows = _layers.append(cache.key, new_key, cache.index)
        value_rows = _layers.append(cache.value, value, cache.index)
        out = _layers.cached_attention(
            query, rows, value_rows, cache.index, length, **options
        )
        new_cache = KVCache(rows, value_rows, cache.index + count)
        return jax.vmap(self.output_proj)(out.reshape(t, -1)), new_cache

    def init_cache(self, max_length: int, dtype: DTypeLike | None = None) -> KVCache:
        """Return an empty cache for one sequence.

        Args:
            max_length: the most tokens it can hold.
            dtype: of the cache; None is the parameters'.
        """
        dtype = self.key_proj.weight.dtype if dtype is None else dtype
        shape = (max_length, self.num_kv_heads, self.head_dim)
        zeros = jnp.zeros(shape, dtype)
        return KVCache(zeros, zeros, jnp.zeros((), jnp.int32))
