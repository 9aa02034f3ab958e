"""Print the CUDA glue of a call: its mods as functors, its `Config`, its kernels.

Everything else is in the headers of `fkl_jax/device`. The text depends on the spec and
on what the shapes select (docs/cuda.md, section 1), so equal calls give equal bytes,
which is what compiled kernels are found by.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ._cuda_launch import Glue
from ._functors import CAPTURE_TYPES, functor
from ._program import Program
from ._spec import AttentionSpec
from ._tuning import MAX_HEAD_DIM, Plan, choose_plan, tune_key

MAX_CAPTURES = 12  # kMaxCaptures of device/attention/params.cuh
_SAVED = ("out", "lse", "dout", "dlse")


def forward_glue(spec: AttentionSpec, avals: Sequence[Any]) -> Glue:
    """Return the kernels of a forward call.

    Raises:
        NotImplementedError: the kernels cannot take the call; the text says why.
    """
    operands = spec.named(avals)
    _check(spec, operands)
    score = spec.score.program.forward() if spec.score and spec.score.program else None
    merged = merges_query_heads(spec, operands)
    plan = choose_plan(tune_key(spec, operands, None, merged_query=merged))
    return _glue("Forward", spec, operands, plan, score, ())


def backward_glue(
    spec: AttentionSpec, avals: Sequence[Any], results: Sequence[str]
) -> Glue:
    """Return the kernels of a backward call; `avals` ends with out, lse, dout, dlse.

    Raises:
        NotImplementedError: the kernels cannot take the call; the text says why.
    """
    operands = spec.named(avals[: len(avals) - len(_SAVED)])
    _check(spec, operands)
    merged = merges_query_heads(spec, operands)
    plan = choose_plan(tune_key(spec, operands, results, merged_query=merged))
    score = spec.score.program if spec.score else None
    return _glue("Backward", spec, operands, plan, score, results)


# --- checks --------------------------------------------------------------------------


def _check(spec: AttentionSpec, operands: dict[str, Any]) -> None:
    query, value = operands["query"], operands["value"]
    if str(query.dtype) not in _ELEMENT:
        raise NotImplementedError(
            f"query has dtype {query.dtype}; the CUDA kernels take float32, bfloat16 "
            "and float16"
        )
    for name, dim in (
        ("head_dim", query.shape[-1]),
        ("value head_dim", value.shape[-1]),
    ):
        if not 0 < dim <= MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name} is {dim}; the CUDA kernels take 1 to {MAX_HEAD_DIM}"
            )
    if "bias" in operands and str(operands["bias"].dtype) not in _ELEMENT:
        raise NotImplementedError(
            f"bias has dtype {operands['bias'].dtype}; the CUDA kernels take float32, "
            "bfloat16 and float16"
        )
    for name, mod in (("score_mod", spec.score), ("mask_mod", spec.mask)):
        if mod is not None and mod.program is None:
            raise NotImplementedError(
                f"{name} cannot be compiled: it uses {mod.unsupported}"
            )
        for node in mod.program.nodes if mod and mod.program else ():
            if node.op == "load" and node.data[2] not in CAPTURE_TYPES:
                raise NotImplementedError(f"{name} reads an array of {node.data[2]}")
    if len(spec.capture_ndims) > MAX_CAPTURES:
        raise NotImplementedError(
            f"the mods read {len(spec.capture_ndims)} arrays; the CUDA kernels take "
            f"at most {MAX_CAPTURES}"
        )


# --- the text ------------------------------------------------------------------------

_ELEMENT = {
    "float32": "float",
    "bfloat16": "fkl::BFloat16",
    "float16": "fkl::Float16",
}


def _glue(
    direction: str,
    spec: AttentionSpec,
    operands: dict[str, Any],
    plan: Plan,
    score: Program | None,
    results: Sequence[str],
) -> Glue:
    mask = spec.mask.program if spec.mask else None
    other = plan.unaligned
    headers = _by_class(
        [f'#include "{header}"' for header in plan.headers],
        [f'#include "{header}"' for header in other.headers] if other else None,
    )
    kernels = _by_class(
        _kernels(direction, spec, operands, plan, results),
        _kernels(direction, spec, operands, other, results) if other else None,
    )
    lines = [
        *headers,
        *(['#include "attention/interval.cuh"'] if mask else []),
        *functor("ScoreMod", score, results),
        *functor("MaskMod", mask, ()),
        '#line 1 "kernels"',
        *kernels,
    ]
    unaligned = other.launch if other else None
    launch = dataclasses.replace(plan.launch, unaligned=unaligned)
    assert other or not plan.launch.tensor_maps, "TMA reads aligned rows only"
    return Glue(text="\n".join([*lines, ""]), launch=launch)


def _by_class(aligned: list[str], unaligned: list[str] | None) -> list[str]:
    if unaligned is None:
        return aligned
    return ["#if FKL_ALIGNED", *aligned, "#else", *unaligned, "#endif"]


def _kernels(
    direction: str,
    spec: AttentionSpec,
    operands: dict[str, Any],
    plan: Plan,
    results: Sequence[str],
) -> list[str]:
    lines = _config(spec, operands, plan, results)
    for kernel, function in zip(plan.launch.kernels, plan.functions, strict=True):
        bounds = f"{kernel.threads}"
        if kernel.blocks_per_processor is not None:
            bounds += f", {kernel.blocks_per_processor}"
        lines += [
            f"static_assert(fkl::{function}_shared_bytes<Config> == "
            f'{kernel.shared_bytes}, "{function}: the plan has another size");',
            f'extern "C" __global__ void __launch_bounds__({bounds})',
            f"{kernel.name}(const __grid_constant__ fkl::{direction}Params params) {{",
            f"  fkl::{function}<Config, ScoreMod, MaskMod>(params);",
            "}",
        ]
    return lines


def _config(
    spec: AttentionSpec,
    operands: dict[str, Any],
    plan: Plan,
    results: Sequence[str],
) -> list[str]:
    element = _ELEMENT[str(operands["query"].dtype)]
    has_bias = "bias" in operands
    bias_element = _ELEMENT[str(operands["bias"].dtype)] if has_bias else "float"
    members: list[tuple[str, int | bool]] = [
        ("kFullPrecision", element == "float" and spec.precision == "highest"),
        ("kHeadDim", _round_up(operands["query"].shape[-1], 16)),
        ("kValueHeadDim", _round_up(operands["value"].shape[-1], 16)),
        ("kHasBias", has_bias),
        ("kHasSegmentIds", "q_segment_ids" in operands),
        ("kHasQLengths", "q_seq_lengths" in operands),
        ("kHasKvLengths", "kv_seq_lengths" in operands),
        ("kHasBlockMask", "block_mask" in operands),
        ("kHasSinks", "sinks" in operands),
        ("kMergedQuery", merges_query_heads(spec, operands)),
        ("kHasDbias", "bias" in results),
        ("kHasDscale", "scale" in results),
        ("kHasDcaptures", any(r.startswith("capture.") for r in results)),
        ("kDeterministic", spec.deterministic),
        *plan.config,
    ]
    return [
        "struct Config {",
        f"  using Element = {element};",
        f"  using BiasElement = {bias_element};",
        "  static constexpr bool kAligned = FKL_ALIGNED;",
        *(
            f"  static constexpr {'bool' if isinstance(value, bool) else 'int'} "
            f"{name} = {str(value).lower()};"
            for name, value in members
        ),
        "};",
    ]


def merges_query_heads(spec: AttentionSpec, operands: dict[str, Any]) -> bool:
    """True if nothing but the query depends on which head of a group a row is of, so
    that the heads' rows may share a tile."""
    programs = [mod.program for mod in (spec.score, spec.mask) if mod]
    reads_head = any(p is not None and p.uses("h") for p in programs)
    per_head = any(
        name in operands and operands[name].shape[-3] != 1
        for name in ("bias", "block_mask")
    )
    return not reads_head and not per_head


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
