"""What a call looks like once it is lowered for CUDA, from a machine without a GPU."""

import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fkl_jax
from fkl_jax import _backends, _codegen, _cuda_launch, _warmup

CALLS = r"stablehlo\.custom_call @(fkl_attention_\w+)"


def arrays(shape=(2, 64, 4, 32), dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype)] * 3


def attend(q, k, v, **options):
    return fkl_jax.attention(q, k, v, implementation="ffi", **options)


def gradients(q, k, v, **options):
    out, pullback = jax.vjp(lambda *x: attend(*x, **options), q, k, v)
    return out, pullback(out)


def lower(function, *operands, platforms=("cuda",)):
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=platforms).as_text()


def attribute(text, name):
    return re.findall(rf'\b{name} = "((?:[^"\\]|\\.)*)"', text)


def test_both_directions_are_custom_calls_with_their_kernels_inside():
    text = lower(gradients, *arrays())
    assert re.findall(CALLS, text) == ["fkl_attention_fwd", "fkl_attention_bwd"]
    glues, names = attribute(text, "cuda_glue"), attribute(text, "cuda_kernels")
    assert len(glues) == len(names) == 2
    for glue, kernels in zip(glues, names, strict=True):
        for name in kernels.split():
            assert f"{name}(const __grid_constant__" in glue
    assert "score_code" not in text and "mask_code" not in text


def test_cpu_calls_have_bytecode_and_no_kernels():
    text = lower(gradients, *arrays(), platforms=("cpu",))
    assert re.findall(CALLS, text) == ["fkl_attention_fwd", "fkl_attention_bwd"]
    assert "score_code" in text and "cuda_glue" not in text


def test_glue_is_that_of_the_code_generator():
    text = lower(attend, *arrays())
    jaxpr = jax.make_jaxpr(attend)(*arrays())
    (glue,) = _warmup.glues_of(jaxpr.jaxpr)
    (escaped,) = attribute(text, "cuda_glue")
    printed = re.sub(
        r"\\([0-9A-F]{2}|.)",
        lambda m: chr(int(m[1], 16)) if len(m[1]) == 2 else m[1],
        escaped,
    )
    assert printed == glue.text


def test_backward_has_a_workspace_of_the_documented_size():
    text = lower(gradients, *arrays())
    shapes = re.findall(r"tensor<(\d+)xui8>", text)
    results = attribute(text, "results")
    assert results[1] == "query key value workspace"
    jaxpr = jax.make_jaxpr(gradients)(*arrays())
    _, glue = _warmup.glues_of(jaxpr.jaxpr)
    sizes = _cuda_launch.Sizes.of_out((2, 64, 4, 32))
    expected = _cuda_launch.backward_workspace_bytes(
        glue.launch, sizes, ("query", "key", "value")
    )
    assert str(expected) in shapes


def test_vmap_over_some_operands_sizes_the_workspace_for_all():
    def mapped(q, k, v):
        return jax.vmap(gradients, in_axes=(0, None, None))(q, k, v)

    q = jax.ShapeDtypeStruct((3, 2, 64, 4, 32), jnp.bfloat16)
    one, three = lower(gradients, *arrays()), lower(mapped, q, *arrays()[1:])
    sizes = [max(map(int, re.findall(r"tensor<(\d+)xui8>", t))) for t in (one, three)]
    assert sizes[1] == 3 * sizes[0]
    assert re.findall(CALLS, three) == ["fkl_attention_fwd", "fkl_attention_bwd"]


def test_export_for_both_platforms_runs_here():
    qkv = [jax.random.normal(k, (1, 32, 2, 16)) for k in jax.random.split(KEY, 3)]
    exported = jax.export.export(
        jax.jit(attend),
        platforms=("cuda", "cpu"),
        disabled_checks=fkl_jax.export_checks(),
    )(*qkv)
    assert exported.platforms == ("cuda", "cpu")
    assert "cuda_glue" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(*qkv), attend(*qkv))


KEY = jax.random.key(0)


def test_refused_forward_is_plain_jax_and_announced(monkeypatch):
    monkeypatch.setattr(_backends, "_announced", set())
    with pytest.warns(fkl_jax.FallbackWarning, match="head_dim is 288; the CUDA"):
        text = lower(attend, *arrays((1, 16, 2, 288)))
    assert "fkl_attention_fwd" not in text and "stablehlo.dot_general" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(attend, *arrays((1, 16, 2, 288)), platforms=("cpu",))


def test_refused_backward_leaves_the_forward_alone(monkeypatch):
    monkeypatch.setattr(_backends, "_announced", set())
    bias = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32)

    def loss(q, k, v, bias):
        out = attend(q, k, v, bias=bias, deterministic=True)
        return out.astype(jnp.float32).sum()

    with pytest.warns(fkl_jax.FallbackWarning, match="deterministic gradients"):
        text = lower(jax.grad(loss, argnums=3), *arrays(), bias)
    assert re.findall(CALLS, text) == ["fkl_attention_fwd"]


def test_symbolic_shapes_are_plain_jax_on_cuda(monkeypatch):
    monkeypatch.setattr(_backends, "_announced", set())
    (b,) = jax.export.symbolic_shape("b")
    with pytest.warns(fkl_jax.FallbackWarning, match="shapes that are numbers"):
        exported = jax.export.export(
            jax.jit(attend),
            platforms=("cuda",),
            disabled_checks=fkl_jax.export_checks(),
        )(*arrays((b, 16, 2, 32), jnp.float32))
    assert "cuda_glue" not in exported.mlir_module()


# --- the choice on a machine with a GPU ----------------------------------------------


@pytest.fixture(name="gpu_process")
def _gpu_process(monkeypatch):
    """As if the default device were a GPU on which everything works."""
    monkeypatch.setattr(_backends, "_platform", lambda: "gpu")
    monkeypatch.setattr(_backends, "why_no_cuda", lambda: None)
    monkeypatch.setattr(_backends, "_announced", set())


def choose(shape, implementation, dtype=jnp.bfloat16, **options):
    jaxpr = jax.make_jaxpr(
        lambda *x: fkl_jax.attention(*x, implementation=implementation, **options)
    )(*arrays(shape, dtype))
    return "ffi" if "fkl_attention_fwd" in str(jaxpr) else "xla"


def test_gpu_takes_the_kernels(gpu_process):
    assert choose((1, 16, 2, 32), None) == "ffi"
    assert choose((1, 16, 2, 32), "ffi") == "ffi"
    assert choose((1, 16, 2, 32), "xla") == "xla"


def test_gpu_refusal_is_announced_or_raised(gpu_process):
    with pytest.warns(fkl_jax.FallbackWarning, match="head_dim is 288"):
        assert choose((1, 16, 2, 288), None) == "xla"
    with pytest.raises(NotImplementedError, match="head_dim is 288; the CUDA kernels"):
        choose((1, 16, 2, 288), "ffi")


def test_gpu_without_compiler_is_announced_or_raised(gpu_process, monkeypatch):
    monkeypatch.setattr(_backends, "why_no_cuda", lambda: "no NVRTC library")
    with pytest.warns(fkl_jax.FallbackWarning, match="no NVRTC library"):
        assert choose((1, 16, 2, 32), None) == "xla"
    with pytest.raises(NotImplementedError, match="no NVRTC library"):
        choose((1, 16, 2, 32), "ffi")


def test_eager_calls_print_their_kernels_once(gpu_process, monkeypatch):
    _backends._cuda_refusal.cache_clear()
    printed = []
    original = _codegen.forward_glue
    monkeypatch.setattr(
        _codegen, "forward_glue", lambda *a: printed.append(a) or original(*a)
    )
    for _ in range(3):
        choose((1, 16, 2, 32), None)
    assert len(printed) == 1


def test_cpu_as_default_device_of_a_gpu_process(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_backends, "why_no_cuda", lambda: "no NVRTC library")
    with jax.default_device(jax.devices("cpu")[0]):
        assert choose((1, 16, 2, 32), None) == "ffi"


# --- warmup --------------------------------------------------------------------------


def test_common_shapes_have_kernels():
    todo, refused = _warmup.jobs(_warmup.common_shapes(), "sm_80")
    assert refused == []
    assert len({job.glue for job in todo}) == len(todo) > 4


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{}", "must hold a JSON list of objects"),
        ('[{"heads": 3}]', "unknown field 'heads'"),
        ('[{"head_dim": "64"}]', "head_dim is '64', not a int"),
    ],
)
def test_bad_shapes_file_is_a_sentence(tmp_path, text, expected):
    file = tmp_path / "shapes.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=expected):
        _warmup.read_shapes(str(file))


def test_warmup_without_gpu_says_so():
    command = [sys.executable, "-P", "-m", "fkl_jax", "warmup"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if _backends.why_no_cuda() is None:
        pytest.skip("a GPU is here")
    assert done.returncode == 1 and "cannot compile: " in done.stderr
    assert "Traceback" not in done.stderr
