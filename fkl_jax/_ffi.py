"""The only module that talks to `jax.ffi`: registration, attributes and the custom
calls."""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ._bytecode import encode
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
    return None


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
    spec: AttentionSpec, operands: Sequence[Any], out: Any, lse: Any
) -> tuple[jax.Array, jax.Array]:
    """Emit the forward custom call; `out` and `lse` are the avals of the results."""
    rows = int(np.prod(lse.shape[:-1]))
    flat = jax.ShapeDtypeStruct((rows, lse.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(FORWARD, (jax.ShapeDtypeStruct(out.shape, out.dtype), flat))
    program = (
        spec.score.program.forward() if spec.score and spec.score.program else None
    )
    o, flat_lse = call(
        *operands, **_attributes(spec, spec.operands, ("out", "lse"), program)
    )
    return o, flat_lse.reshape(lse.shape)


def call_backward(
    spec: AttentionSpec,
    operands: Sequence[Any],
    results: Sequence[str],
    avals: Sequence[Any],
) -> list[jax.Array]:
    """Emit the backward custom call; `operands` ends with out, lse, dout, dlse."""
    roles = (*spec.operands, "out", "lse", "dout", "dlse")
    call = jax.ffi.ffi_call(
        BACKWARD, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    )
    program = spec.score.program if spec.score else None
    return list(call(*operands, **_attributes(spec, roles, results, program)))


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return what `jax.export.export(..., disabled_checks=...)` needs for modules with
    these calls."""
    check = jax.export.DisabledSafetyCheck.custom_call
    return [check(FORWARD), check(BACKWARD)]


# --- private -------------------------------------------------------------------------


def _attributes(
    spec: AttentionSpec, operands: Sequence[str], results: Sequence[str], score: Any
) -> dict[str, Any]:
    return {
        "abi": ABI,
        "spec": spec.text,
        "operands": " ".join(operands),
        "results": " ".join(results),
        "num_batch_dims": spec.num_batch_dims,
        "block_q": spec.block_q,
        "block_kv": spec.block_kv,
        "score_code": encode(score),
        "mask_code": encode(spec.mask.program if spec.mask else None),
        "deterministic": spec.deterministic,
        "full_precision": spec.precision == "highest",
    }
