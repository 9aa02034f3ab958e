"""Mask mods: which keys a query sees, as functions of the indices; they compose with
`&`, `|` and `~`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._score_mods import CallSizes, Mod, as_int, as_param, as_segment_ids
from ._validate import to_int32


class MaskMod(Mod):
    """A function of the indices: `function(b, h, q_idx, kv_idx, *params) -> bool`,
    True where attention is allowed.

    Composes with `&`, `|` and `~`. The function is static, the parameters are traced.

    Args:
        function: written in `jax.numpy` on scalars; it may close over arrays.
        params: arrays or numbers, passed after the four scalars.

    Example:
        >>> checkers = MaskMod(lambda b, h, q, kv: (q + kv) % 2 == 0) & Causal()
    """

    _arguments = ("b", "h", "q_idx", "kv_idx")

    def __and__(self, other: "MaskMod | Callable[..., Any]") -> "MaskMod":
        return _Combined("&", self, as_mask_mod(other))

    def __rand__(self, other: "MaskMod | Callable[..., Any]") -> "MaskMod":
        return _Combined("&", as_mask_mod(other), self)

    def __or__(self, other: "MaskMod | Callable[..., Any]") -> "MaskMod":
        return _Combined("|", self, as_mask_mod(other))

    def __ror__(self, other: "MaskMod | Callable[..., Any]") -> "MaskMod":
        return _Combined("|", as_mask_mod(other), self)

    def __invert__(self) -> "MaskMod":
        return _Combined("~", self)

    def distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Bounds of `q_idx - kv_idx` outside of which nothing is live, None where it
        has none: what lets whole parts of a sequence be skipped."""
        return self._distances() if self._is_builtin() else (None, None)

    def _distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        return None, None

    def _is_builtin(self) -> bool:
        return type(self).__module__ == __name__ and type(self) is not MaskMod


class _Combined(MaskMod):
    """Mask mods joined by one operator; a pytree of its parts."""

    def __init__(self, operator: str, *parts: MaskMod):
        self.operator, self.parts = operator, parts

    def _flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self.parts, self.operator

    @classmethod
    def _unflatten(cls, operator: Any, parts: Any) -> "_Combined":
        mod = object.__new__(cls)
        mod.operator, mod.parts = operator, tuple(parts)
        return mod

    def __call__(self, *args: Any) -> Any:
        values = [_as_bool(part(*args), part) for part in self.parts]
        if self.operator == "~":
            return jnp.logical_not(values[0])
        join = jnp.logical_and if self.operator == "&" else jnp.logical_or
        return join(*values)

    def _distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        if self.operator == "~":
            return None, None
        bounds = [part.distances() for part in self.parts]
        return intersection(bounds) if self.operator == "&" else _hull(bounds)

    def __repr__(self) -> str:
        if self.operator == "~":
            return f"~{self.parts[0]!r}"
        return f"({f' {self.operator} '.join(map(repr, self.parts))})"

    def sources(self) -> tuple[Any, ...]:
        return tuple(f for part in self.parts for f in part.sources())

    def check_signature(self, where: str) -> None:
        for part in self.parts:
            part.check_signature(where)

    def check_call(self, sizes: CallSizes) -> None:
        for part in self.parts:
            part.check_call(sizes)


def _as_bool(value: Any, part: Any) -> Any:
    described = (
        repr(value)
        if value is None or isinstance(value, tuple | list)
        else f"{jnp.result_type(value)} of shape {jnp.shape(value)}"
    )
    if described != "bool of shape ()":
        raise TypeError(
            f"attention: mask_mod {part!r} returned {described}; it must "
            "return a bool scalar."
        )
    return value


def as_mask_mod(value: Any) -> MaskMod:
    """Return a MaskMod: the value itself, or a plain function wrapped."""
    if isinstance(value, MaskMod):
        return value
    if isinstance(value, Mod) or not callable(value):
        raise TypeError(
            f"attention: mask_mod is {value!r} (a {type(value).__name__}); it must be "
            "a MaskMod, a function (b, h, q_idx, kv_idx) -> bool, or a tuple of those."
        )
    return MaskMod(value)


class Causal(MaskMod):
    """Live iff `kv_idx <= q_idx`."""

    def __init__(self) -> None:
        super().__init__(_causal)

    def _distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        return jnp.int32(0), None


class SlidingWindow(MaskMod):
    """Live iff `q_idx - left <= kv_idx <= q_idx + right`.

    Args:
        left: int scalar >= 0, may be traced; None is unbounded.
        right: int scalar >= 0, may be traced, default 0; None is unbounded.

    Raises:
        ValueError: a bound is negative.
    """

    def __init__(self, left: ArrayLike | None, right: ArrayLike | None = 0):
        bounds = []
        for name, bound in (("left", left), ("right", right)):
            if bound is not None:
                bounds.append(as_int(bound, f"{name} of SlidingWindow"))
                _check_not_negative(bounds[-1], f"{name} of SlidingWindow")
        functions: dict[tuple[bool, bool], Callable[..., Any]] = {
            (True, True): _window,
            (True, False): _window_left,
            (False, True): _window_right,
            (False, False): _window_none,
        }
        super().__init__(functions[left is not None, right is not None], *bounds)

    @classmethod
    def last(cls, w: ArrayLike) -> "SlidingWindow":
        """Keep the last `w` keys, the query's own included (`left = w - 1`).

        Args:
            w: int scalar >= 1, may be traced.
        """
        width = as_int(w, "w of SlidingWindow.last")
        if not isinstance(width, jax.core.Tracer) and int(width) < 1:
            raise ValueError(
                f"attention: w of SlidingWindow.last is {int(width)}; it must be at "
                "least 1, the query's own key."
            )
        return cls(width - 1, 0)

    def _distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        bounds = [to_int32(bound) for bound in self.params]
        left = bounds.pop(0) if self.function in (_window, _window_left) else None
        return -bounds[0] if bounds else None, left


class PrefixLM(MaskMod):
    """Live iff `kv_idx < length` or `kv_idx <= q_idx`: a prefix seen by all, causal
    after it.

    Args:
        length: int scalar, or one per batch element, shape (B,); may be traced.
    """

    def __init__(self, length: ArrayLike):
        super().__init__(_prefix_lm, as_int(length, "length of PrefixLM", (0, 1)))

    def check_call(self, sizes: CallSizes) -> None:
        if self.params[0].ndim:
            sizes.check_axis("length of PrefixLM", self.params[0].shape, 0, "batch")


class SegmentIds(MaskMod):
    """Live iff the segment ids of query and key are equal and not negative.

    Args:
        q_ids: int, shape (B, T) read at [b, q_idx], or (T,) for all batch elements.
        kv_ids: the same for keys; None means `q_ids`.
    """

    def __init__(self, q_ids: ArrayLike, kv_ids: ArrayLike | None = None):
        given = [q_ids] if kv_ids is None else [q_ids, kv_ids]
        names = ("q_ids of SegmentIds", "kv_ids of SegmentIds")[: len(given)]
        super().__init__(_segment_ids, *as_segment_ids(given, names))

    def check_call(self, sizes: CallSizes) -> None:
        for name, ids, axis in (
            ("q_ids of SegmentIds", self.params[0], "q_seq_len"),
            ("kv_ids of SegmentIds", self.params[-1], "kv_seq_len"),
        ):
            if ids.ndim == 2:
                sizes.check_axis(name, ids.shape, 0, "batch")
            sizes.check_axis(name, ids.shape, -1, axis)


class Padding(MaskMod):
    """Live iff `kv_idx < lengths[b]`.

    Args:
        lengths: int, shape (B,), or a scalar for all batch elements.
    """

    def __init__(self, lengths: ArrayLike):
        super().__init__(_padding, as_int(lengths, "lengths of Padding", (0, 1)))

    def check_call(self, sizes: CallSizes) -> None:
        if self.params[0].ndim:
            sizes.check_axis("lengths of Padding", self.params[0].shape, 0, "batch")


class DenseMask(MaskMod):
    """Live where an array says so.

    Args:
        array: bool, shape (T, S), (N, T, S) or (B, N, T, S), each axis full or 1 (1 =
            the same for all); True = attend. Read at global indices.
    """

    def __init__(self, array: ArrayLike):
        mask = as_param(array, "array of DenseMask")
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"attention: array of DenseMask has dtype {mask.dtype}; it must be "
                "bool "
                "(an additive mask goes to `bias`)."
            )
        if mask.ndim not in (2, 3, 4):
            raise ValueError(
                f"attention: array of DenseMask has shape {mask.shape}; it must be "
                "(T, S), (N, T, S) or (B, N, T, S), each axis full or 1."
            )
        super().__init__(_dense_mask, mask)

    def check_call(self, sizes: CallSizes) -> None:
        shape = self.params[0].shape
        axes = ("batch", "num_q_heads", "q_seq_len", "kv_seq_len")[-len(shape) :]
        for axis, what in enumerate(axes):
            if shape[axis] != 1:
                sizes.check_axis("array of DenseMask", shape, axis, what)


def intersection(
    bounds: Sequence[tuple[jax.Array | None, jax.Array | None]],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Bounds of what is within all the bounds."""
    low = [a for a, _ in bounds if a is not None]
    high = [b for _, b in bounds if b is not None]
    return (
        functools.reduce(jnp.maximum, low) if low else None,
        functools.reduce(jnp.minimum, high) if high else None,
    )


def _hull(
    bounds: Sequence[tuple[jax.Array | None, jax.Array | None]],
) -> tuple[jax.Array | None, jax.Array | None]:
    """Bounds of what is within any of the bounds."""
    low = [a for a, _ in bounds if a is not None]
    high = [b for _, b in bounds if b is not None]
    return (
        functools.reduce(jnp.minimum, low) if len(low) == len(bounds) else None,
        functools.reduce(jnp.maximum, high) if len(high) == len(bounds) else None,
    )


def _check_not_negative(value: jax.Array, name: str) -> None:
    if not isinstance(value, jax.core.Tracer) and int(value) < 0:
        raise ValueError(
            f"attention: {name} is {int(value)}; it must not be negative (None means "
            "unbounded)."
        )


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def _window(b: Any, h: Any, q_idx: Any, kv_idx: Any, left: Any, right: Any) -> Any:
    return _window_left(b, h, q_idx, kv_idx, left) & _window_right(
        b, h, q_idx, kv_idx, right
    )


# Distances are compared, not `q_idx - left`: a bound near the largest int32 must not
# wrap.
def _window_left(b: Any, h: Any, q_idx: Any, kv_idx: Any, left: Any) -> Any:
    return q_idx - kv_idx <= left


def _window_right(b: Any, h: Any, q_idx: Any, kv_idx: Any, right: Any) -> Any:
    return kv_idx - q_idx <= right


def _window_none(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return jnp.bool_(True)


def _prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any, length: Any) -> Any:
    prefix = length if length.ndim == 0 else length[b]
    return (kv_idx < prefix) | (kv_idx <= q_idx)


def _segment_ids(
    b: Any, h: Any, q_idx: Any, kv_idx: Any, q_ids: Any, kv_ids: Any = None
) -> Any:
    kv_ids = q_ids if kv_ids is None else kv_ids
    of_query = q_ids[q_idx] if q_ids.ndim == 1 else q_ids[b, q_idx]
    of_key = kv_ids[kv_idx] if kv_ids.ndim == 1 else kv_ids[b, kv_idx]
    return (of_query == of_key) & (of_query >= 0)


def _padding(b: Any, h: Any, q_idx: Any, kv_idx: Any, lengths: Any) -> Any:
    return kv_idx < (lengths if lengths.ndim == 0 else lengths[b])


def _dense_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, array: Any) -> Any:
    heads = (h,) if array.ndim >= 3 else ()
    batch = (b,) if array.ndim == 4 else ()
    index = (*batch, *heads, q_idx, kv_idx)
    # A size-1 axis is read at 0 whatever the index.
    index = tuple(0 if n == 1 else i for i, n in zip(index, array.shape, strict=True))
    return array[index]
