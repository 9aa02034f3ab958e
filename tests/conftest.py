"""Suite-wide rules: warnings are errors, long sweeps are opt-in, compiles counted."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Sharding is tested on eight CPU devices of this process; to the other tests the first
# is all there is. Not by XLA_FLAGS, which the programs that tests start would inherit.
jax.config.update("jax_num_cpu_devices", 8)

# What a test is run with: the device, and `implementation`. "cuda" needs `-m gpu`.
BACKENDS = {"xla": "xla", "ffi": "ffi", "cuda": "ffi"}

_compiled: list[str] = []
_traced: list[str] = []


def _record(event: str, duration: float, **kwargs) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)
    elif event == "/jax/core/compile/jaxpr_trace_duration":
        _traced.append(str(kwargs.get("fun_name", "")))


jax.monitoring.register_event_duration_secs_listener(_record)


@dataclasses.dataclass
class Counts:
    compiles: int = 0
    traces: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def count_compiles() -> Iterator[Counts]:
    """Count what XLA compiles and JAX traces in the body of the `with`."""
    counts = Counts()
    compiled, traced = len(_compiled), len(_traced)
    yield counts
    counts.compiles = len(_compiled) - compiled
    counts.traces = _traced[traced:]


@pytest.fixture(name="count_compiles")
def _count_compiles():
    return count_compiles


def pytest_addoption(parser):
    parser.addoption(
        "--backends",
        default=",".join(BACKENDS),
        help="backends to test; one that cannot run here fails its tests, never skips",
    )


def pytest_configure(config):
    wanted = config.option.markexpr
    config.option.markexpr = " and ".join(
        [f"({wanted})"] * bool(wanted)
        + ["not long"] * ("long" not in wanted)
        + ["not gpu"] * ("gpu" not in wanted)
    )


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        backends = metafunc.config.getoption("--backends").split(",")
        only = metafunc.definition.get_closest_marker("backends")
        if only is not None:
            backends = [name for name in backends if name in only.args]
        metafunc.parametrize(
            "backend",
            [
                pytest.param(
                    BACKENDS[name],
                    id=name,
                    marks=[pytest.mark.gpu] if name == "cuda" else [],
                )
                for name in backends
            ],
        )


@functools.cache
def _gpus() -> list[jax.Device] | str:
    try:
        return jax.devices("cuda")
    except RuntimeError as e:
        return str(e)


@pytest.fixture(autouse=True)
def _device(request):
    """Tests marked `gpu` run on the GPU, the others on the CPU even if there is one.

    Without a GPU the former are skipped, or fail if FKL_JAX_REQUIRE_GPU=1 says that
    there should be one.
    """
    if request.node.get_closest_marker("gpu") is None:
        device = jax.devices("cpu")[0]
    elif isinstance(_gpus(), str):
        text = f"no CUDA device: {_gpus()}"
        if os.environ.get("FKL_JAX_REQUIRE_GPU") == "1":
            pytest.fail(text)
        pytest.skip(text)
    else:
        device = _gpus()[0]
    # The oracle is exact: on a GPU, float32 products are TF32 unless asked otherwise.
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield
