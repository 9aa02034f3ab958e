"""Suite-wide rules: warnings are errors, long sweeps are opt-in, compiles counted."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))

BACKENDS = ("xla", "ffi")

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
    config.addinivalue_line("markers", "long: a long sweep; run with -m long")
    config.addinivalue_line("filterwarnings", "error")
    if not config.option.markexpr:
        config.option.markexpr = "not long"


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        backends = metafunc.config.getoption("--backends").split(",")
        metafunc.parametrize("backend", backends)
