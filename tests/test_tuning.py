"""Keys of kernels: few of them, and every member of a key is served by its plan."""

import dataclasses
import itertools
import types

import cuda_calls
import jax
import pytest
from cases import Case

from fkl_jax import _tuning
from fkl_jax._tuning import ANY_GPU, TuneKey, anchored, choose_plan

KEY = TuneKey(
    direction="forward",
    dtype="bfloat16",
    head_dim=128,
    value_head_dim=128,
    q_seq_len=1024,
    kv_seq_len=1024,
    group=4,
    num_heads=32,
    has_mask=True,
    has_score_program=False,
    has_bias=False,
)
DIRECTIONS = ("forward", "backward")


def _key(call: cuda_calls.Call, gpu: _tuning.Gpu = ANY_GPU) -> TuneKey:
    operands = dict(zip(call.spec.operands, call.avals, strict=False))
    return _tuning.tune_key(
        call.spec, operands, call.results, merged_query=True, gpu=gpu
    )


def test_sizes_are_anchored_to_few_powers_of_two():
    buckets = {anchored(x) for x in range(1, 65537)}
    assert buckets == {2**k for k in range(17)}
    assert all(x <= anchored(x) < 2 * x for x in range(1, 4097))
    assert anchored(0) == anchored(1) == 1


def test_all_lengths_up_to_65536_share_few_plans():
    lengths = [x for k in range(17) for x in (2**k, 2**k + 1, 3 * 2**k // 2)]
    lengths = sorted(x for x in set(lengths) if x <= 65536)
    choose_plan.cache_clear()
    keys = set()
    for t, s in itertools.product(lengths, lengths):
        key = dataclasses.replace(
            KEY, direction="backward", q_seq_len=anchored(t), kv_seq_len=anchored(s)
        )
        choose_plan(key)
        keys.add(key)
    assert len(keys) <= 17 * 17
    assert choose_plan.cache_info().misses == len(keys)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        # The aligned member of a bucket first, then an unaligned one.
        (
            Case(dtype="float32", head_dim=128, value_head_dim=128),
            Case(dtype="float32", head_dim=126, value_head_dim=115),
        ),
        (
            Case(dtype="bfloat16", head_dim=48, value_head_dim=48),
            Case(dtype="bfloat16", head_dim=36, value_head_dim=33),
        ),
        # What a bucket has beside its power of two.
        (Case(q_seq_len=64, kv_seq_len=256), Case(q_seq_len=37, kv_seq_len=129)),
        (
            Case(q_seq_len=1, kv_seq_len=512, num_q_heads=8, num_kv_heads=1),
            Case(
                q_seq_len=1, kv_seq_len=300, num_q_heads=6, num_kv_heads=1, batch=(2, 1)
            ),
        ),
    ],
)
def test_a_plan_serves_every_member_of_its_bucket(first, second, direction):
    """Whether rows are aligned (also: whether an operand is a slice of an array) is
    seen at the launch; the text must not know."""
    one, other = (cuda_calls.calls(c)[direction == "backward"] for c in (first, second))
    assert _key(one) == _key(other)
    choose_plan.cache_clear()
    glue = one.glue()
    assert other.glue() == glue
    assert choose_plan.cache_info().misses == 1
    assert "kAligned = FKL_ALIGNED" in glue.text


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_head_dim_has_a_plan_within_the_limits_of_the_device(
    direction, arch, dtype
):
    gpu = dataclasses.asdict(cuda_calls.gpu(arch))
    dims = range(16, 257, 16)
    for head_dim, value_head_dim in itertools.product(dims, dims):
        for variant in (
            {},
            {"full_precision": dtype == "float32", "has_score_program": True},
            {"q_seq_len": 1, "kv_seq_len": 65536, "group": 8},
            {"deterministic": direction == "backward"},
        ):
            key = dataclasses.replace(
                KEY,
                direction=direction,
                dtype=dtype,
                head_dim=head_dim,
                value_head_dim=value_head_dim,
                **{**gpu, **variant},
            )
            plan = choose_plan(key)
            assert len(plan.functions) == len(plan.launch.kernels)
            for kernel in plan.launch.kernels:
                assert kernel.shared_bytes <= key.max_shared_bytes
                assert kernel.threads <= 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tma_is_for_aligned_rows_of_16_bits_on_9_0(dtype):
    key = dataclasses.replace(KEY, dtype=dtype)
    elsewhere = choose_plan(key)
    assert elsewhere.unaligned is None and not elsewhere.launch.tensor_maps
    here = dataclasses.replace(
        key, **dataclasses.asdict(cuda_calls.gpu("sm_90a")), num_heads=4
    )
    plan = choose_plan(here)
    if dtype == "float32":
        assert plan.unaligned is None
        return
    assert plan.functions == ("forward_sm90",)
    assert [m.array for m in plan.launch.tensor_maps] == [
        "query",
        "key",
        "value",
        "out",
    ]
    assert plan.unaligned is not None and not plan.unaligned.launch.tensor_maps
    assert plan.unaligned.functions == ("forward_sm80",)
    # A tile for every block, or as many blocks as there are multiprocessors.
    assert plan.launch.kernels[0].max_blocks is None
    assert plan.launch.scratch_bytes == 0
    many = choose_plan(dataclasses.replace(here, num_heads=64))
    assert many.launch.kernels[0].max_blocks == 132
    assert many.launch.scratch_bytes > 0
    few_rows = choose_plan(dataclasses.replace(here, q_seq_len=16))
    assert few_rows.functions[0] == "decode_sm80"


@pytest.mark.parametrize("head_dim", [48, 64, 96, 128, 192, 256])
def test_the_backward_takes_tma_too_but_not_for_sums_in_a_fixed_order(head_dim):
    gpu = dataclasses.asdict(cuda_calls.gpu("sm_90a"))
    key = dataclasses.replace(
        KEY,
        direction="backward",
        dtype="bfloat16",
        head_dim=head_dim,
        value_head_dim=head_dim,
        **gpu,
    )
    plan = choose_plan(key)
    assert plan.functions == (
        "backward_preprocess_sm90",
        "backward_keys_sm90",
        "backward_finish_sm90",
    )
    assert len(plan.launch.tensor_maps) == 4
    assert plan.launch.accumulator_head_dim >= head_dim
    assert plan.unaligned is not None and not plan.unaligned.launch.tensor_maps
    fixed = choose_plan(dataclasses.replace(key, deterministic=True))
    assert fixed.unaligned is None and "backward_queries_sm80" in fixed.functions


def test_the_key_says_what_a_call_has():
    plain = _key(cuda_calls.calls(Case())[0])
    assert not (plain.has_mask or plain.has_bias or plain.has_score_program)
    assert (plain.direction, plain.dtype, plain.group) == ("forward", "float32", 2)
    assert plain.num_heads == 8  # 2 batch elements of 4 heads
    for case, field in (
        (Case(causal=True), "has_mask"),
        (Case(lengths="k"), "has_mask"),
        (Case(segment_ids=True), "has_mask"),
        (Case(block_mask="holes"), "has_mask"),
        (Case(bias="BNTS"), "has_bias"),
        (Case(score_mods=("alibi",)), "has_score_program"),
    ):
        forward, backward = cuda_calls.calls(case)
        for call in (forward, backward):
            others = {field: False}
            assert getattr(_key(call), field)
            assert not getattr(dataclasses.replace(_key(call), **others), field)
        assert dataclasses.replace(_key(forward), **{field: False}) == plain
    assert _key(cuda_calls.calls(Case(bias="BNTS"))[1]).bias_gradient
    assert _key(cuda_calls.calls(Case(score_mods=("alibi",)))[1]).capture_gradients


def test_vmap_axes_count_as_heads():
    call = cuda_calls.calls(Case())[0]
    avals = tuple(
        jax.ShapeDtypeStruct((3 if k == 0 else 1, *a.shape), a.dtype)
        for k, a in enumerate(call.avals)
    )
    assert _key(dataclasses.replace(call, avals=avals)).num_heads == anchored(3 * 8)


def test_a_device_is_described_by_what_it_says():
    def device(**kwargs):
        return types.SimpleNamespace(**kwargs)

    h100 = device(compute_capability="9.0", core_count=132)
    assert _tuning._describe(h100) == _tuning.Gpu(
        arch=90, max_shared_bytes=232448, num_multiprocessors=132
    )
    unknown = _tuning._describe(device(compute_capability="15.3", core_count=7))
    assert unknown.max_shared_bytes == ANY_GPU.max_shared_bytes
    assert _tuning._describe(device(compute_capability=None)) == ANY_GPU


def test_a_family_can_be_asked_for(monkeypatch):
    h100 = types.SimpleNamespace(compute_capability="9.0", core_count=132)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [h100])
    assert _tuning.local_gpu().arch == 90
    monkeypatch.setenv("FKL_JAX_CUDA_FAMILY", "sm80")
    asked = _tuning.local_gpu()
    assert asked.arch == 80
    assert dataclasses.replace(asked, arch=90) == _tuning._describe(h100)
    monkeypatch.setenv("FKL_JAX_CUDA_FAMILY", "sm81")
    with pytest.raises(ValueError, match="FKL_JAX_CUDA_FAMILY is 'sm81'; it must be"):
        _tuning.local_gpu()


def test_without_a_gpu_the_plan_is_for_any():
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU is here")
    assert _tuning.local_gpu() == ANY_GPU
