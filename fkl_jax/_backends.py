"""The backends in order of preference; each answers yes, or says why not."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _ffi
from ._spec import AttentionSpec

_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
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
    missing = why_no_cuda()
    cuda = (
        "ffi on cuda",
        missing is None,
        missing or "CUDA kernels for float32, bfloat16 and float16, made when needed",
    )
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
    platform = _platform()
    reason = _why_not_compiled(spec, operands)
    if reason is None and platform in _CUDA:
        reason = why_no_cuda() or _why_not_cuda(spec, operands)
    elif reason is None and implementation is None and platform != "cpu":
        reason = f"there are no kernels for {platform}"
    if reason is None:
        return "ffi"
    if implementation == "ffi":
        raise NotImplementedError(
            "attention: no backend takes this call as asked (implementation='ffi').\n"
            f"  ffi: {reason}\n  xla: not asked for; implementation=None or 'xla' "
            "runs it in plain JAX."
        )
    announce(reason)
    return "xla"


@functools.cache
def why_no_cuda() -> str | None:
    """Why the CUDA kernels cannot run in this process, or None."""
    missing = _ffi.register()
    if missing is not None:
        return missing
    from . import _ext

    try:
        devices = _ext.cuda_devices()
        _ext.nvrtc_version()
    except RuntimeError as e:
        return str(e)
    return None if devices else "the NVIDIA driver finds no GPU"


def check_cuda_runs() -> None:
    """Raise NotImplementedError if JAX has a GPU that the kernels cannot run on.

    Without one a call is lowered for another machine, of which nothing is known."""
    try:
        has_gpu = bool(jax.local_devices(backend="cuda"))
    except RuntimeError:
        has_gpu = False
    missing = why_no_cuda() if has_gpu else None
    if missing is not None:
        raise NotImplementedError(missing)


def announce(reason: str) -> None:
    """Warn, once per reason, that a call runs in plain JAX."""
    if reason not in _announced:
        _announced.add(reason)
        warnings.warn(
            f"attention runs in plain JAX (implementation='xla'), because {reason}. "
            "Pass implementation='xla' to choose this silently.",
            FallbackWarning,
            stacklevel=5,
        )


# --- private -------------------------------------------------------------------------

_CUDA = ("gpu", "cuda")


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


def _platform() -> str:
    """Where a call runs unless its arrays say otherwise."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(device.platform)


def _why_not_cuda(spec: AttentionSpec, operands: dict[str, Any]) -> str | None:
    return _cuda_refusal(spec, tuple((x.shape, x.dtype) for x in operands.values()))


@functools.lru_cache(maxsize=4096)
def _cuda_refusal(
    spec: AttentionSpec, arrays: tuple[tuple[tuple[int, ...], Any], ...]
) -> str | None:
    """Ask the code generator; an eager call must not print its kernels every time."""
    from ._codegen import forward_glue

    if not all(isinstance(d, int) for shape, _ in arrays for d in shape):
        return "the CUDA kernels need shapes that are numbers"
    try:
        forward_glue(spec, [jax.ShapeDtypeStruct(*array) for array in arrays])
    except NotImplementedError as refusal:
        return str(refusal)
    return None
