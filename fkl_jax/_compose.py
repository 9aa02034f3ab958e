"""Turn the mods of a call into at most two traced functions: one for the scores, one
for the masks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _avals, _trace
from ._mask_mods import MaskMod, as_mask_mod
from ._score_mods import Mod, ScoreMod, as_int
from ._spec import TracedMod, compile_mod

ScoreModLike = ScoreMod | MaskMod | Callable[..., Any]
MaskModLike = MaskMod | Callable[..., Any]


class _CausalShifted(MaskMod):
    """Live iff `kv_idx <= q_idx + shift`: the diagonal ends in the bottom right corner
    for `shift = S - T`."""

    def __init__(self, shift: int):
        super().__init__(_causal_shifted, as_int(shift, "shift"))

    def _distances(self) -> tuple[jax.Array | None, jax.Array | None]:
        return -self.params[0], None

    def _is_builtin(self) -> bool:
        return True


def _causal_shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any, shift: Any) -> Any:
    return kv_idx - q_idx <= shift


def bottom_right(q_len: int, kv_len: int) -> MaskMod:
    """Causal with the diagonal through the last query and the last key. The lengths may
    be those of an export, which are not numbers."""
    shift = kv_len - q_len
    return _CausalShifted(shift if isinstance(shift, int) else jnp.asarray(shift))


def split_mods(score_mod: Any, mask_mod: Any) -> tuple[list[ScoreMod], list[MaskMod]]:
    """Return score mods from left to right, and all masks; a MaskMod given as
    score_mod is a mask."""
    scores: list[ScoreMod] = []
    masks: list[MaskMod] = []
    for mod in _as_list(score_mod):
        if isinstance(mod, MaskMod):
            masks.append(mod)
        elif isinstance(mod, ScoreMod):
            scores.append(mod)
        elif callable(mod):
            scores.append(ScoreMod(mod))
        else:
            raise TypeError(
                f"attention: score_mod is {mod!r} (a {type(mod).__name__}); it must be "
                "a ScoreMod, a MaskMod, a function (s, b, h, q_idx, kv_idx) -> s, or a "
                "tuple of those."
            )
    for mod in _as_list(mask_mod):
        if isinstance(mod, ScoreMod):
            raise TypeError(
                f"attention: mask_mod is the score mod {mod!r}; pass it as score_mod, "
                "or give a MaskMod."
            )
        masks.append(as_mask_mod(mod))
    return scores, masks


def trace_scores(
    mods: Sequence[ScoreMod], dtype: Any
) -> tuple[TracedMod | None, list[Any]]:
    """Compose score mods; return the traced function and its captures."""
    with _avals.off_mesh():
        return _trace_all("score", tuple(mods), dtype)


def trace_masks(mods: Sequence[MaskMod]) -> tuple[TracedMod | None, list[Any]]:
    """Conjoin masks; return the traced function and its captures."""
    with _avals.off_mesh():
        return _trace_all("mask", tuple(mods), jnp.float32)


def checked_mask(value: Any, mod: Mod) -> Any:
    """Return what a mask returned; raise unless it is a bool scalar."""
    _check_array(value, f"mask_mod {_name(mod)}", "a bool scalar")
    kind = jnp.result_type(value)
    if kind != jnp.bool_:
        hint = (
            "; a function that returns a score is a score_mod"
            if jnp.issubdtype(kind, jnp.floating)
            else ""
        )
        raise TypeError(
            f"attention: mask_mod {_name(mod)} returned {kind}; it must return a bool "
            f"scalar{hint}."
        )
    if jnp.shape(value):
        raise ValueError(
            f"attention: mask_mod {_name(mod)} returned an array of shape "
            f"{jnp.shape(value)}; it must return a scalar."
        )
    return jnp.asarray(value)


# --- private -------------------------------------------------------------------------


def _as_list(mods: Any) -> list[Any]:
    if mods is None:
        return []
    return list(mods) if isinstance(mods, tuple | list) else [mods]


def _trace_all(
    kind: str, mods: tuple[Any, ...], dtype: Any
) -> tuple[TracedMod | None, list[Any]]:
    if not mods:
        return None, []
    leaves, tree = jax.tree_util.tree_flatten(mods)
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    dtype = np.dtype(dtype)
    if not any(mod.sources() for mod in mods):
        # Only built-in functions: what they mean cannot change, so one trace serves
        # for ever.
        return _trace_builtin(kind, tree, avals, dtype), leaves
    where = f"{kind}_mod"
    for mod in mods:
        mod.check_signature(where)
    function = _composed(kind, tree, dtype)
    function.sources = [f for mod in mods for f in mod.sources()]  # type: ignore[attr-defined]
    try:
        jaxpr, captures = _trace.trace(function, kind, leaves, dtype)
    except jax.errors.TracerArrayConversionError as e:
        e.add_note(
            f"attention: {where} indexes a numpy array with a traced index; use "
            "jnp.asarray(array) outside it."
        )
        raise
    except jax.errors.ConcretizationTypeError as e:
        e.add_note(
            f"attention: {where} is traced on scalars; use jnp.where instead of "
            "Python branches on them."
        )
        raise
    except Exception as e:
        # JAX before 0.12 has no rule for this, and no public name for the error.
        if type(e).__name__ == "ShardingTypeError":
            e.add_note(
                f"attention: {where} closes over an array that is sharded along "
                "explicit axes of the mesh; pass the array as a parameter: "
                "ScoreMod(function, array) or MaskMod(function, array)."
            )
        raise
    _trace.check_effects(jaxpr, where)
    capture_avals = tuple(jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in captures)
    key = _Key(jaxpr, kind, capture_avals, len(leaves), dtype, function)
    if key.text is not None:
        traced = _compile_cached(key)
        if traced.program is not None:
            return traced, captures
    # Not from the cache: a reason for having no program names a line of this function.
    return _compile_fresh(key), captures


class _Key:
    """A traced function, compared by the text of its jaxpr; `text` is None if that
    does not say everything."""

    def __init__(
        self,
        jaxpr: Any,
        kind: str,
        captures: Any,
        num_params: int,
        dtype: Any,
        function: Any,
    ):
        self.args = (jaxpr, kind, captures, num_params, dtype, function)
        self.text = str(jaxpr) if _trace.text_says_all(jaxpr) else None
        self._static = (kind, captures, num_params, str(dtype), self.text)

    def __hash__(self) -> int:
        return hash(self._static)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._static == other._static


def _compile_fresh(key: _Key) -> TracedMod:
    return compile_mod(_trace.analyse(*key.args), key.args[-1])


_compile_cached = functools.lru_cache(maxsize=1024)(_compile_fresh)


@functools.lru_cache(maxsize=1024)
def _trace_builtin(kind: str, tree: Any, avals: Any, dtype: Any) -> TracedMod:
    # Built-in mods close over nothing, so placeholders can stand for their parameters
    # while tracing.
    function = _composed(kind, tree, dtype)
    params = [jnp.zeros(a.shape, a.dtype) for a in avals]
    jaxpr, captures = _trace.trace(function, kind, params, dtype)
    assert len(captures) == len(params)
    return compile_mod(
        _trace.analyse(jaxpr, kind, avals, len(avals), dtype, function), function
    )


def _composed(kind: str, tree: Any, dtype: Any) -> Callable[..., Any]:
    """One function of the scalars and all parameters."""
    n = len(_trace.INPUTS[kind])

    def function(*args: Any) -> Any:
        scalars, leaves = args[:n], args[n:]
        mods: tuple[Mod, ...] = jax.tree_util.tree_unflatten(tree, leaves)
        if kind == "score":
            s, *rest = scalars
            for mod in mods:
                s = _checked_score(mod(s, *rest), mod, dtype)
            return s
        live = None
        for mod in mods:
            value = checked_mask(mod(*scalars), mod)
            live = value if live is None else jnp.logical_and(live, value)
        return live

    return function


def _name(mod: Mod) -> str:
    return getattr(getattr(mod, "function", None), "__name__", repr(mod))


def _checked_score(value: Any, mod: Mod, dtype: Any) -> Any:
    _check_array(value, f"score_mod {_name(mod)}", "a float scalar")
    kind = jnp.result_type(value)
    if not jnp.issubdtype(kind, jnp.floating):
        hint = (
            "; a function that returns bool is a mask, pass it as mask_mod"
            if kind == jnp.bool_
            else ""
        )
        raise TypeError(
            f"attention: score_mod {_name(mod)} returned {kind}; it must return a "
            f"float scalar{hint}."
        )
    if jnp.shape(value):
        raise ValueError(
            f"attention: score_mod {_name(mod)} returned an array of shape "
            f"{jnp.shape(value)}; it must return a scalar "
            "(it is called on one score at a time)."
        )
    return jax.lax.convert_element_type(value, dtype)


def _check_array(value: Any, where: str, due: str) -> None:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float):
        raise TypeError(f"attention: {where} returned {value!r}; it must return {due}.")
