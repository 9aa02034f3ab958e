"""Export and ahead-of-time compilation: what leaves this process works in another."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fkl_jax
from fkl_jax import _ffi

CHECKS = fkl_jax.export_checks()


def _attend(q, k, v, slopes, lengths):
    def mod(s, b, h, q_idx, kv_idx):
        return jnp.tanh(s) - slopes[h] * (q_idx - kv_idx) + 0.1 * b

    return fkl_jax.attention(
        q, k, v, causal="bottom_right", score_mod=mod, kv_seq_lengths=lengths
    )


def _gradients(attend, q, k, v, slopes, lengths):
    def loss(*floats):
        return jnp.sum(jnp.sin(attend(*floats, lengths)))

    return jax.grad(loss, (0, 1, 2, 3))(q, k, v, slopes)


def _arguments(batch=3, q_len=5, kv_len=7):
    rng = np.random.default_rng(0)
    shapes = (batch, q_len, 4, 8), (batch, kv_len, 2, 8), (batch, kv_len, 2, 8), (4,)
    floats = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    return (*floats, jnp.asarray(rng.integers(1, kv_len + 1, batch), jnp.int32))


def _export(args, platforms=("cpu",), attend=_attend):
    return jax.export.export(
        jax.jit(attend), platforms=platforms, disabled_checks=CHECKS
    )(*args)


def _run_fresh(folder, code: str) -> None:
    """Run a program in a process that has traced nothing."""
    program = f"""
import jax, jax.numpy as jnp, numpy as np
import fkl_jax
def load(name):
    with open({str(folder)!r} + "/" + name, "rb") as f:
        return jax.export.deserialize(bytearray(f.read()))
arrays = np.load({str(folder)!r} + "/arrays.npz")
def check(got, name):
    np.testing.assert_allclose(got, arrays[name], rtol=1e-5, atol=1e-5)
{code}"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_fresh_process_runs_value_and_gradient(tmp_path):
    args = _arguments()
    out, grads = _attend(*args), _gradients(_attend, *args)
    named = {f"arg{k}": x for k, x in enumerate(args)}
    named |= {"out": out, **{f"grad{k}": x for k, x in enumerate(grads)}}
    np.savez(tmp_path / "arrays.npz", **named)
    names = []
    for platforms in (("cpu",), ("cuda", "cpu")):
        names.append("_".join(platforms))
        exported = _export(args, platforms)
        (tmp_path / names[-1]).write_bytes(exported.serialize(vjp_order=1))
    _run_fresh(
        tmp_path,
        f"""
args = [jnp.asarray(arrays[f"arg{{k}}"]) for k in range(5)]
for name in {names}:
    attend = load(name).call
    check(attend(*args), "out")
    loss = lambda *floats: jnp.sum(jnp.sin(attend(*floats, args[4])))
    for k, grad in enumerate(jax.grad(loss, (0, 1, 2, 3))(*args[:4])):
        check(grad, f"grad{{k}}")
""",
    )


def test_export_for_cuda_alone_holds_kernels_for_both_directions():
    exported = _export(_arguments(2, 16, 32), ("cuda",))
    assert "cuda_kernels" in exported.mlir_module()
    assert "fkl_attention_fwd" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert "fkl_attention_bwd" in again.vjp().mlir_module()


@pytest.mark.parametrize(
    "platforms,implementation",
    [(("cpu",), None), (("cpu",), "xla"), (("cuda", "cpu"), None)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*shapes that are numbers")
def test_sizes_that_are_not_numbers(platforms, implementation):
    b, t, s = jax.export.symbolic_shape("b, t, s")
    avals = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [
            ((b, t, 4, 8), jnp.float32),
            ((b, s, 2, 8), jnp.float32),
            ((b, s, 2, 8), jnp.float32),
            ((4,), jnp.float32),
            ((b,), jnp.int32),
        ]
    ]

    def attend(q, k, v, slopes, lengths):
        return fkl_jax.attention(
            q, k, v, causal="bottom_right", score_mod=fkl_jax.ALiBi(slopes),
            kv_seq_lengths=lengths, implementation=implementation,
        )  # fmt: skip

    exported = _export(avals, platforms, attend)
    exported = jax.export.deserialize(exported.serialize(vjp_order=1))
    for sizes in ((3, 5, 7), (1, 300, 1))[: 1 if implementation == "xla" else 2]:
        args = _arguments(*sizes)
        np.testing.assert_allclose(
            exported.call(*args), attend(*args), rtol=1e-5, atol=1e-5
        )
        got = _gradients(exported.call, *args)
        for a, b in zip(got, _gradients(attend, *args), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_without_the_checks_jax_says_what_is_missing():
    exported = jax.export.export(jax.jit(_attend))
    with pytest.raises(ValueError, match="fkl_attention_fwd"):
        exported(*_arguments())


def test_another_abi_is_refused(monkeypatch):
    args = _arguments(1, 3, 4)
    monkeypatch.setattr(_ffi, "ABI", _ffi.ABI + 1)
    exported = _export(args)
    monkeypatch.undo()
    words = (
        f"made for version {_ffi.ABI + 1} of the custom call, this library has version "
        f"{_ffi.ABI}; trace or export it again"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(exported.call(*args))


def test_several_devices_by_shard_map(tmp_path):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y")

    def attend(q, k, v, slopes, lengths):
        return fkl_jax.attention(
            q, k, v, score_mod=fkl_jax.ALiBi(slopes), kv_seq_lengths=lengths
        )

    divided = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec, spec, spec, P("y"), P("x")), out_specs=spec
    )
    args = _arguments(batch=4)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(args, (spec, spec, spec, P("y"), P("x")), strict=True)
    ]
    exported = _export(placed, attend=divided)
    assert exported.nr_devices == 4
    named = {f"arg{k}": x for k, x in enumerate(args)}
    np.savez(tmp_path / "arrays.npz", **named, out=attend(*args))
    (tmp_path / "divided").write_bytes(exported.serialize(vjp_order=1))
    _run_fresh(
        tmp_path,
        """
jax.config.update("jax_num_cpu_devices", 4)
attend = load("divided")
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
args = [
    jax.device_put(arrays[f"arg{k}"], s)
    for k, s in enumerate(attend.in_shardings_jax(mesh))
]
check(attend.call(*args), "out")
""",
    )


def test_compiled_ahead_of_time():
    args = _arguments()
    compiled = jax.jit(_attend).lower(*args).compile()
    np.testing.assert_allclose(compiled(*args), _attend(*args), atol=1e-6)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    gradients = jax.jit(lambda *a: _gradients(_attend, *a)).lower(*avals).compile()
    for a, b in zip(gradients(*args), _gradients(_attend, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_module_for_cuda_runs_on_a_gpu():
    args = _arguments(2, 64, 128)
    exported = jax.export.deserialize(_export(args, ("cuda",)).serialize(vjp_order=1))
    np.testing.assert_allclose(exported.call(*args), _attend(*args), atol=1e-6)
    got = _gradients(exported.call, *args)
    for a, b in zip(got, _gradients(_attend, *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
