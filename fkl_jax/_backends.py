"""The backends in order of preference; each answers yes, or says why not."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from . import _ffi
from ._spec import AttentionSpec

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# A sanity bound on head dims in the compiled backends; beyond it nobody has measured
# anything.
_MAX_HEAD_DIM = 1024

_announced: set[str] = set()


class FallbackWarning(UserWarning):
    """`implementation=None` runs a call in plain JAX because the compiled backend
    cannot take it."""


def report() -> list[tuple[str, bool, str]]:
    """Return (name, available, reason) of each backend on this machine, in order of
    preference."""
    reason = _ffi.register()
    cpu = (
        "ffi on cpu",
        reason is None,
        reason or f"C++ kernels for float32, bfloat16 and float16 ({_isa()})",
    )
    cuda = ("ffi on cuda", False, _NO_CUDA)
    return [cpu, cuda, ("xla", True, "plain JAX, every platform, float64 too")]


def choose(
    spec: AttentionSpec, operands: dict[str, Any], implementation: str | None
) -> str:
    """Return "ffi" or "xla" for a call.

    Raises:
        NotImplementedError: `implementation="ffi"` and the compiled backend cannot
            take the call.
    """
    if implementation == "xla":
        return "xla"
    reason = _why_not_compiled(spec, operands)
    if reason is None and implementation is None:
        reason = _why_not_preferred()
        if reason is not None:
            _announce(reason)
            return "xla"
    if reason is None:
        return "ffi"
    if implementation == "ffi":
        raise NotImplementedError(
            "attention: no backend takes this call as asked (implementation='ffi').\n"
            f"  ffi: {reason}\n  xla: not asked for; implementation=None or 'xla' "
            "runs it in plain JAX."
        )
    _announce(reason)
    return "xla"


# --- private -------------------------------------------------------------------------

_NO_CUDA = "the CUDA kernels are not part of this version"


def _isa() -> str:
    try:
        from . import _ext

        return _ext.cpu_isa()
    except Exception as e:  # the doctor prints whatever is wrong, and goes on
        return str(e)


def _why_not_compiled(spec: AttentionSpec, operands: dict[str, Any]) -> str | None:
    missing = _ffi.register()
    if missing is not None:
        return missing
    query, value = operands["query"], operands["value"]
    if query.dtype not in _DTYPES:
        return (
            f"query has dtype {query.dtype}; the kernels take float32, bfloat16 and "
            "float16"
        )
    for name, dim in (
        ("head_dim", query.shape[-1]),
        ("value head_dim", value.shape[-1]),
    ):
        if dim > _MAX_HEAD_DIM:
            return f"{name} is {dim}; the kernels take at most {_MAX_HEAD_DIM}"
    for name, mod in (("score_mod", spec.score), ("mask_mod", spec.mask)):
        if mod is not None and mod.program is None:
            return f"{name} cannot be compiled: it uses {mod.unsupported}"
    return None


def _why_not_preferred() -> str | None:
    """Why the custom call would not run on the default device of this process."""
    platform = jax.default_backend()
    if platform == "cpu":
        return None
    return (
        _NO_CUDA
        if platform in ("gpu", "cuda")
        else f"there are no kernels for {platform}"
    )


def _announce(reason: str) -> None:
    if reason not in _announced:
        _announced.add(reason)
        warnings.warn(
            f"attention runs in plain JAX (implementation='xla'), because {reason}. "
            "Pass implementation='xla' to choose this silently.",
            FallbackWarning,
            stacklevel=5,
        )
