"""Every kernel of the test matrix compiles for every architecture, without spills,
warnings, or more shared memory than the device has. Needs NVRTC, no GPU.

FKL_JAX_REQUIRE_NVRTC=1 turns a missing NVRTC from a skip into a failure.
"""

import dataclasses
import re
from typing import Any

import cuda_calls
import nvrtc
import pytest
from cases import Case

# Bytes that the kernels of one call may spill. A forward is free of spills but for an
# address. The backward holds two accumulators and two products: what is rarely needed
# there (walks, masks, captures) goes to memory; each number is a debt, not a wish.
FORWARD_SPILLS = 32
MORE_FORWARD_SPILLS = {"alibi_64_90": 192}  # in mixed tiles
BACKWARD_SPILLS = 320
MORE_BACKWARD_SPILLS = {
    "all_masks": 512,
    "alibi_soft_cap_function": 800,
    "branches": 640,
    "dense_2d": 640,
    "float32_64_highest": 1100,
    "float32_128_highest": 900,
    "float32_256_default": 448,
    "float32_256_highest": 448,
    "own_mask_mod": 640,
    "window": 640,
}

# Architectures, and the CUDA version whose NVRTC compiles for them.
ARCHS_13 = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
ARCHS_12 = ("sm_80", "sm_90a")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """One compilation."""

    name: str
    case: Case
    arch: str = "sm_80"
    cuda: int = 13
    precision: str = "default"
    aligned: bool = True
    long: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.arch}-cuda{self.cuda}"


def _case(head_dim: int = 64, **kwargs: Any) -> Case:
    kwargs.setdefault("dtype", "bfloat16")
    kwargs.setdefault("value_head_dim", head_dim)
    kwargs.setdefault("q_seq_len", 512)
    kwargs.setdefault("kv_seq_len", 512)
    return Case(batch=(1,), head_dim=head_dim, **kwargs)


CAUSAL = _case(128, causal=True)
DECODE = _case(128, q_seq_len=1, kv_seq_len=4096, lengths="k", num_q_heads=16)
DECODE_OFFSET = dataclasses.replace(DECODE, causal=True, offsets="batch")

MATRIX = [
    *(Compile(name="causal", case=CAUSAL, arch=a) for a in ARCHS_13),
    *(Compile(name="causal", case=CAUSAL, arch=a, cuda=12) for a in ARCHS_12),
    # Head dims: each tile of the plans.
    *(
        Compile(name=f"plain_{d}", case=_case(d), long=d in (16, 80, 112, 160))
        for d in (16, 40, 64, 80, 96, 112, 128, 160, 192, 256)
    ),
    Compile(name="plain_192_128", case=_case(192, value_head_dim=128)),
    Compile(name="plain_64_256", case=_case(64, value_head_dim=256), long=True),
    Compile(name="float16", case=_case(64, dtype="float16"), arch="sm_90a"),
    *(
        Compile(
            name=f"float32_{d}_{p}",
            case=_case(d, dtype="float32"),
            precision=p,
            long=(d, p) not in ((64, "default"), (256, "highest")),
        )
        for d in (64, 128, 256)
        for p in ("default", "highest")
    ),
    # Rows that are not aligned: 126 floats, 36 bfloat16.
    Compile(
        name="unaligned_126",
        case=_case(126, dtype="float32", causal=True),
        aligned=False,
    ),
    Compile(name="unaligned_36", case=_case(36), aligned=False),
    Compile(name="unaligned_256", case=_case(256), aligned=False, long=True),
    # Sources of masks.
    Compile(name="segments", case=_case(causal=True, segment_ids=True)),
    Compile(name="lengths", case=_case(lengths="qk")),
    Compile(
        name="blocks", case=_case(128, block_mask="holes", block_q=128, block_kv=128)
    ),
    Compile(
        name="all_masks",
        case=_case(
            segment_ids=True,
            lengths="qk",
            block_mask="holes",
            block_q=128,
            block_kv=64,
            mask_mods=("window",),
            offsets="batch",
            sinks=True,
        ),
    ),
    # Programs.
    Compile(name="soft_cap", case=_case(128, causal=True, score_mods=("soft_cap",))),
    Compile(name="alibi", case=_case(128, causal=True, score_mods=("alibi",))),
    Compile(name="relative_bias", case=_case(score_mods=("relative_bias",))),
    Compile(name="read_twice", case=_case(score_mods=("read_twice",))),
    Compile(name="dense_2d", case=_case(mask_mods=("dense_2d",))),
    Compile(name="per_head", case=_case(mask_mods=("per_head_function",))),
    *(
        Compile(name=name, case=_case(score_mods=(name,)), long=True)
        for name in (
            "alibi_soft_cap_function",
            "many_operations",
            "own_score_mod",
            "captured_table",
            "captured_full_bias",
            "branches",
            "leaky",
            "temperature",
        )
    ),
    *(
        Compile(name=name, case=_case(mask_mods=(name,)), long=True)
        for name in ("window", "prefix_lm_per_batch", "segment_ids", "own_mask_mod")
    ),
    # Cheap forms of programs.
    *(
        Compile(
            name=f"{name}_90",
            case=_case(head_dim, causal=True, score_mods=(mod,), fixed_mods=True),
            arch="sm_90a",
            long=is_long,
        )
        for name, head_dim, mod, is_long in (
            ("cap", 128, "soft_cap_20", False),
            ("alibi", 128, "alibi", False),
            ("alibi_64", 64, "alibi", True),
            ("cap_256", 256, "soft_cap_20", True),
            ("alibi_cap", 128, "alibi_soft_cap_function", True),
        )
    ),
    # Bias, sinks, traced scale.
    Compile(name="bias", case=_case(bias="BNTS", causal=True)),
    Compile(
        name="bias_broadcast", case=_case(bias="NS", bias_dtype="bfloat16"), long=True
    ),
    Compile(name="sinks", case=_case(sinks=True, traced_scale=True, scale=0.3)),
    Compile(name="deterministic", case=_case(128, causal=True, deterministic=True)),
    Compile(
        name="deterministic_scale",
        case=_case(deterministic=True, traced_scale=True, scale=0.3),
        long=True,
    ),
    # Few queries.
    Compile(name="decode", case=DECODE),
    Compile(name="decode_offset", case=DECODE_OFFSET, arch="sm_90a"),
    Compile(
        name="decode_mha", case=dataclasses.replace(DECODE, num_kv_heads=16), long=True
    ),
    Compile(
        name="decode_256",
        case=dataclasses.replace(DECODE_OFFSET, head_dim=256, value_head_dim=256),
        long=True,
    ),
    # The heaviest ones on the other architectures.
    *(
        Compile(name=name, case=case, arch=arch, long=True)
        for arch in ARCHS_13[1:]
        for name, case in (
            ("float32_256", _case(256, dtype="float32")),
            ("soft_cap", _case(128, causal=True, score_mods=("soft_cap",))),
            ("decode_offset", DECODE_OFFSET),
        )
        if (name, arch) != ("decode_offset", "sm_90a")
    ),
]


def _compiler(major: int) -> nvrtc.Nvrtc:
    found = nvrtc.find(major)
    if isinstance(found, nvrtc.Nvrtc):
        return found
    nvrtc.missing(found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "one",
    [pytest.param(c, marks=[pytest.mark.long] if c.long else []) for c in MATRIX],
    ids=str,
)
def test_kernels_compile_without_spills_and_warnings(one, direction):
    compiler = _compiler(one.cuda)
    is_backward = direction == "backward"
    call = cuda_calls.calls(one.case)[is_backward].with_precision(one.precision)
    gpu = cuda_calls.gpu(one.arch)
    glue = call.glue(gpu)
    compiled = compiler.compile(glue.text, one.arch, one.aligned)
    assert compiled.warnings == []
    allowed = MORE_FORWARD_SPILLS.get(one.name, FORWARD_SPILLS)
    if is_backward:
        allowed = MORE_BACKWARD_SPILLS.get(one.name, BACKWARD_SPILLS)
    assert compiled.spill_bytes <= allowed
    assert len(compiled.registers) == len(glue.launch.kernels)
    # Static shared memory would come on top of what the launch asks for.
    assert not re.search(r"\b[1-9]\d* bytes smem", compiled.log)
    for kernel in glue.launch.kernels:
        assert kernel.shared_bytes <= gpu.max_shared_bytes


def test_the_glue_of_a_call_is_under_a_screenful_and_always_the_same_bytes():
    for call in cuda_calls.calls(CAUSAL):
        text = call.glue().text
        cuda_calls.calls.cache_clear()
        again = cuda_calls.calls(CAUSAL)[call.results is not None]
        assert again is not call and again.glue().text == text
        assert len(text.splitlines()) < 90


def test_values_and_lengths_do_not_change_the_glue():
    first = _case(128, causal=True, score_mods=("soft_cap",), lengths="k")
    other = dataclasses.replace(first, seed=3, q_seq_len=500, kv_seq_len=500)
    for a, b in zip(cuda_calls.calls(first), cuda_calls.calls(other), strict=True):
        assert a.glue() == b.glue()


def test_an_error_of_a_mod_is_located_in_its_program():
    compiler = _compiler(13)
    (call, _) = cuda_calls.calls(_case(score_mods=("soft_cap",)))
    text = call.glue().text.replace("fkl::tanh_f32", "fkl::no_such_function")
    with pytest.raises(nvrtc.CompileError, match=r"score program\(\d+\)"):
        compiler.compile(text, "sm_80")
