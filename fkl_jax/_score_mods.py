"""Score mods: functions of one score and its indices, with parameters that are
operands."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import _validate


def as_param(value: Any, name: str) -> jax.Array:
    """Return a mod's parameter as an array, so that its value is an operand and never
    part of the code."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        _validate.check_fits_int32(value, name)
        return jnp.asarray(value, jnp.int32)
    if isinstance(value, float):
        # float64 under x64: a parameter of a float64 call must not be rounded.
        return jnp.asarray(float(value), float)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"attention: {name} is a {type(value).__name__} of dtype {array.dtype}; "
            "parameters of a mod are numbers, bools or arrays of them."
        )
    return jnp.asarray(array)


def as_float(value: Any, name: str, ndims: tuple[int, ...] = (0,)) -> jax.Array:
    """Return a float parameter of one of the allowed ranks."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    array = as_param(float(value) if is_int else value, name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        if array.dtype == jnp.bool_:
            raise TypeError(f"attention: {name} is bool; it must be a number.")
        array = array.astype(float)
    _check_ndim(array, name, ndims)
    return array


def as_int(value: Any, name: str, ndims: tuple[int, ...] = (0,)) -> jax.Array:
    """Return an int32 parameter of one of the allowed ranks."""
    array = _as_integer(value, name, ndims)
    return _validate.to_int32(array)


def as_segment_ids(values: Sequence[Any], names: Sequence[str]) -> list[jax.Array]:
    """Return int32 segment ids, equal and negative where the ids given are: one array
    for queries and keys, or one for each."""
    ids = [_as_integer(x, n, (1, 2)) for x, n in zip(values, names, strict=True)]
    return list(_validate.segment_ids_to_int32(ids[0], ids[-1]))[: len(ids)]


def _as_integer(value: Any, name: str, ndims: tuple[int, ...]) -> jax.Array:
    _validate.check_fits_int32(value, name)
    array = as_param(value, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"attention: {name} has dtype {array.dtype}; it must be an integer."
        )
    _check_ndim(array, name, ndims)
    return array


def _check_ndim(array: jax.Array, name: str, ndims: tuple[int, ...]) -> None:
    if array.ndim not in ndims:
        allowed = " or ".join(map(str, ndims))
        raise ValueError(
            f"attention: {name} has shape {array.shape}; it must have {allowed} axes."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallSizes:
    """The sizes of a call, which a mod's parameters must fit.

    Attributes:
        batch: product of the batch axes; `b` is below it.
        num_q_heads: `h` is below it.
        q_seq_len: T; `q_idx` is below it unless there are offsets.
        kv_seq_len: S, likewise.
        has_offsets: indices may be beyond T and S.
    """

    batch: int
    num_q_heads: int
    q_seq_len: int
    kv_seq_len: int
    has_offsets: bool

    def check_axis(
        self, name: str, shape: tuple[int, ...], axis: int, what: str
    ) -> None:
        """Raise ValueError if an axis that is read at `b`, `h`, `q_idx` or `kv_idx`
        has another size than that index counts to; a read would clamp, in silence.

        Args:
            name: of the parameter, for the message.
            shape: of the parameter.
            axis: which must match.
            what: "batch", "num_q_heads", "q_seq_len" or "kv_seq_len".
        """
        if self.has_offsets and what.endswith("seq_len"):
            return
        due = getattr(self, what)
        if shape[axis] != due:
            words = {
                "batch": "batch",
                "num_q_heads": "number of query heads",
                "q_seq_len": "query length",
                "kv_seq_len": "key length",
            }
            raise ValueError(
                f"attention: {name} has shape {shape}; its axis {axis} must be the "
                f"{words[what]}, {due}."
            )


class Mod:
    """What score mods and mask mods share: a static function and traced parameters."""

    # The words of the function's signature, for the error about a wrong one.
    _arguments: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Any], *params: Any):
        if not callable(function):
            raise TypeError(
                f"attention: {type(self).__name__} needs a function, not {function!r}."
            )
        self.function = function
        self.params: tuple[Any, ...] = tuple(
            as_param(p, f"parameter {k} of {type(self).__name__}")
            for k, p in enumerate(params)
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, cls._flatten, cls._unflatten)

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.params, self.function

    @classmethod
    def _unflatten(cls, function: Any, params: Any) -> "Mod":
        mod = object.__new__(cls)
        mod.function, mod.params = function, tuple(params)
        return mod

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, *self.params)

    def __repr__(self) -> str:
        name = type(self).__name__
        shown = [_show(p) for p in self.params]
        if self.sources():
            shown = [getattr(self.function, "__name__", repr(self.function)), *shown]
        return f"{name}({', '.join(shown)})"

    def sources(self) -> tuple[Any, ...]:
        """The user's functions in this mod; none for a built-in, whose tracing can be
        remembered."""
        return () if self._is_builtin() else (self.function,)

    def _is_builtin(self) -> bool:
        return type(self).__module__ == __name__.rpartition(".")[
            0
        ] + "._score_mods" and (type(self) is not ScoreMod)

    def check_call(self, sizes: CallSizes) -> None:
        """Raise ValueError if the parameters do not fit a call. Does nothing here; a
        subclass whose parameters have an axis per head, batch element or position
        says so by overriding it."""

    def check_signature(self, where: str) -> None:
        """Raise TypeError if the function cannot take the scalars and the
        parameters."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            return
        words = [*self._arguments, *(f"param{k}" for k in range(len(self.params)))]
        try:
            signature.bind(*words)
        except TypeError:
            raise TypeError(
                f"attention: {where} must take {len(words)} arguments "
                f"({', '.join(words)}), "
                f"but {getattr(self.function, '__name__', 'it')} has the signature "
                f"{signature}."
            ) from None


def _show(p: Any) -> str:
    if isinstance(p, jax.core.Tracer) or not hasattr(p, "shape"):
        return str(p)
    return str(p.item()) if p.ndim == 0 else f"{p.dtype}{list(p.shape)}"


class ScoreMod(Mod):
    """A function of one score: `function(s, b, h, q_idx, kv_idx, *params) -> s`.

    All arguments but `params` are scalars; `b` is the flattened batch index, `h` the
    query head, `q_idx` and `kv_idx` global positions. The function is static, the
    parameters are traced: changing their values never compiles anything, and every
    float parameter gets an exact gradient.

    Args:
        function: written in `jax.numpy` on scalars; it may close over arrays.
        params: arrays or numbers, passed after the five scalars.

    Example:
        >>> temperature = ScoreMod(lambda s, b, h, q, kv, t: s / t, 2.0)
    """

    _arguments = ("s", "b", "h", "q_idx", "kv_idx")


class SoftCap(ScoreMod):
    """`cap * tanh(s / cap)`: keeps scores within (-cap, cap).

    Args:
        cap: float scalar, may be traced; differentiable.
    """

    def __init__(self, cap: ArrayLike):
        super().__init__(_soft_cap, as_float(cap, "cap of SoftCap"))


class ALiBi(ScoreMod):
    """`s - slopes[h] * (q_idx - kv_idx)`: a linear bias in the (signed) distance.

    Args:
        slopes: float scalar, or one per query head, shape (N,); differentiable.

    Source: Press et al., "Train Short, Test Long" (2021).
    """

    def __init__(self, slopes: ArrayLike):
        super().__init__(_alibi, as_float(slopes, "slopes of ALiBi", (0, 1)))

    def check_call(self, sizes: CallSizes) -> None:
        if self.params[0].ndim:
            shape = self.params[0].shape
            sizes.check_axis("slopes of ALiBi", shape, 0, "num_q_heads")


class RelativeBias(ScoreMod):
    """`s + table[h, clip(kv_idx - q_idx, -R, R) + R]`: a learned bias per distance.

    Args:
        table: float, shape (N, 2R + 1), or (2R + 1,) for all heads; differentiable.
    """

    def __init__(self, table: ArrayLike):
        array = as_float(table, "table of RelativeBias", (1, 2))
        if array.shape[-1] % 2 == 0:
            raise ValueError(
                f"attention: table of RelativeBias has shape {array.shape}; "
                "its last axis must be odd (2R + 1 distances)."
            )
        super().__init__(_relative_bias, array)

    def check_call(self, sizes: CallSizes) -> None:
        if self.params[0].ndim == 2:
            shape = self.params[0].shape
            sizes.check_axis("table of RelativeBias", shape, 0, "num_q_heads")


class Temperature(ScoreMod):
    """`s / t`.

    Args:
        t: float scalar, may be traced; differentiable.
    """

    def __init__(self, t: ArrayLike):
        super().__init__(_temperature, as_float(t, "t of Temperature"))


def _soft_cap(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, cap: Any) -> Any:
    return cap * jnp.tanh(s / cap)


def _alibi(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    slope = slopes if slopes.ndim == 0 else slopes[h]
    return s - slope * (q_idx - kv_idx).astype(jnp.float32)


def _relative_bias(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    reach = table.shape[-1] // 2
    k = jnp.clip(kv_idx - q_idx, -reach, reach) + reach
    return s + (table[k] if table.ndim == 1 else table[h, k])


def _temperature(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, t: Any) -> Any:
    return s / t
