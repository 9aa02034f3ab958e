"""The only module that talks to `jax.ffi`: registration, attributes and the custom
calls."""

import functools
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from . import _config
from ._bytecode import encode
from ._cuda_launch import (
    Glue,
    Sizes,
    backward_workspace_bytes,
    forward_workspace_bytes,
)
from ._spec import ABI, AttentionSpec

FORWARD, BACKWARD = "fkl_attention_fwd", "fkl_attention_bwd"


@functools.cache
def register() -> str | None:
    """Register the handlers; return None, or the reason why there are none.

    An extension made for a newer FFI than the runtime's must not be registered: XLA
    would refuse it when the backend starts, and all of JAX with it.
    """
    try:
        from . import _ext
    except ImportError as e:
        return (
            f"the extension module fkl_jax._ext cannot be imported ({e}); "
            "reinstall fkl_jax"
        )
    built, runtime = tuple(_ext.ffi_api_version), runtime_api_version()
    if runtime is None:
        return "the installed jaxlib does not say which FFI version it has"
    if built > runtime:
        return (
            f"the extension was built for XLA FFI {built[0]}.{built[1]}, the "
            "installed jaxlib "
            f"has {runtime[0]}.{runtime[1]}; upgrade jaxlib or rebuild fkl_jax "
            "against it"
        )
    for platform, handlers in _ext.handlers().items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    # An exported or cached module is executed without being lowered here.
    configure_cuda()
    return None


def configure_cuda() -> None:
    """Tell the extension where headers, NVRTC and the cache are. Nothing is looked at:
    these are names for the first call that needs them."""
    from . import _ext

    folders = ("cu13", "cuda_nvrtc")  # of the packages for CUDA 13 and 12
    _ext.set_cuda_settings(
        device_dir=os.path.join(os.path.dirname(__file__), "device"),
        nvrtc=_config.NVRTC.value() or "",
        library_dirs=[
            os.path.join(root, "nvidia", folder, "lib")
            for root in sys.path
            if root
            for folder in folders
        ],
        cache_dir=_config.cache_dir(),
        dump_dir=_config.dump_dir(),
        cache_bytes=_config.cache_bytes(),
    )


def runtime_api_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib, read from the header that it ships."""
    path = os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
    except OSError:
        return None
    found = [
        re.search(rf"#define XLA_FFI_API_{n} (\d+)", text) for n in ("MAJOR", "MINOR")
    ]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def call_forward(
    spec: AttentionSpec, operands: Sequence[Any], out: Any, lse: Any, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Emit the forward custom call; `out` and `lse` are the avals of the results.

    Raises:
        NotImplementedError: there are no kernels for the call on this platform.
    """
    flat = jax.ShapeDtypeStruct((math.prod(lse.shape[:-1]), lse.shape[-1]), jnp.float32)
    results = {"out": jax.ShapeDtypeStruct(out.shape, out.dtype), "lse": flat}
    if platform == "cuda":
        from ._codegen import forward_glue

        avals = _static_avals(operands)
        glue = forward_glue(spec, avals)
        sizes = Sizes.of_out(out.shape)
        code = _cuda_code(glue, forward_workspace_bytes(glue.launch, sizes), results)
    else:
        score = spec.score.program if spec.score else None
        code = _cpu_code(spec, score.forward() if score else None)
    o, flat_lse, *_ = _call(FORWARD, spec, spec.operands, operands, results, code)
    return o, flat_lse.reshape(lse.shape)


def call_backward(
    spec: AttentionSpec,
    operands: Sequence[Any],
    results: Sequence[str],
    avals: Sequence[Any],
    platform: str,
) -> list[jax.Array]:
    """Emit the backward custom call; `operands` ends with out, lse, dout, dlse.

    Raises:
        NotImplementedError: there are no kernels for the call on this platform.
    """
    roles = (*spec.operands, "out", "lse", "dout", "dlse")
    asked = {
        role: jax.ShapeDtypeStruct(a.shape, a.dtype)
        for role, a in zip(results, avals, strict=True)
    }
    if platform == "cuda":
        from ._codegen import backward_glue

        glue = backward_glue(spec, _static_avals(operands), results)
        # Of the results every one has all vmap axes; an operand may have size 1 there.
        first = avals[0]
        lead = first.shape[: first.ndim - spec.base_ndim(results[0])]
        out = operands[roles.index("out")]
        own = out.shape[out.ndim - spec.base_ndim("out") :]
        sizes = Sizes.of_out((*lead, *own))
        size = backward_workspace_bytes(glue.launch, sizes, results)
        code = _cuda_code(glue, size, asked)
    else:
        code = _cpu_code(spec, spec.score.program if spec.score else None)
    grads = _call(BACKWARD, spec, roles, operands, asked, code)
    return list(grads[: len(results)])


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return what `jax.export.export(..., disabled_checks=...)` needs for modules with
    these calls."""
    check = jax.export.DisabledSafetyCheck.custom_call
    return [check(FORWARD), check(BACKWARD)]


# --- private -------------------------------------------------------------------------


def _call(
    name: str,
    spec: AttentionSpec,
    roles: Sequence[str],
    operands: Sequence[Any],
    results: dict[str, jax.ShapeDtypeStruct],
    code: dict[str, Any],
) -> Sequence[jax.Array]:
    return jax.ffi.ffi_call(name, list(results.values()))(
        *operands,
        abi=ABI,
        spec=spec.text,
        operands=" ".join(roles),
        results=" ".join(results),
        num_batch_dims=spec.num_batch_dims,
        block_q=spec.block_q,
        block_kv=spec.block_kv,
        deterministic=spec.deterministic,
        full_precision=spec.precision == "highest",
        **code,
    )


def _cpu_code(spec: AttentionSpec, score: Any) -> dict[str, Any]:
    return {
        "score_code": encode(score),
        "mask_code": encode(spec.mask.program if spec.mask else None),
    }


def _cuda_code(
    glue: Glue, workspace_bytes: int, results: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """The attributes; a workspace joins the results if the kernels need one."""
    if workspace_bytes:
        results["workspace"] = jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)
    return {
        "cuda_glue": glue.text,
        "cuda_kernels": glue.launch.names,
        "cuda_launch": glue.launch.encode(),
    }


def _static_avals(operands: Sequence[Any]) -> list[Any]:
    avals = [jax.typeof(x) for x in operands]
    if not all(isinstance(size, int) for a in avals for size in a.shape):
        raise NotImplementedError("the CUDA kernels need shapes that are numbers")
    return avals
