"""The calls that a `Case` makes, as the CUDA lowering sees them: no GPU is needed."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cases
import jax
import jax.numpy as jnp

from fkl_jax import _backends, _codegen, _tuning
from fkl_jax._cuda_launch import Glue
from fkl_jax._spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: `results` of a backward, None of a forward."""

    spec: AttentionSpec
    avals: tuple[Any, ...]
    results: tuple[str, ...] | None

    def glue(self, gpu: _tuning.Gpu = _tuning.ANY_GPU) -> Glue:
        with mock.patch.object(_tuning, "local_gpu", return_value=gpu):
            if self.results is None:
                return _codegen.forward_glue(self.spec, self.avals)
            return _codegen.backward_glue(self.spec, self.avals, self.results)

    def with_precision(self, precision: str) -> "Call":
        spec = dataclasses.replace(self.spec, precision=precision)
        return dataclasses.replace(self, spec=spec)


@functools.lru_cache(maxsize=256)
def calls(case: cases.Case) -> tuple[Call, Call]:
    """The forward and the backward call of a case."""
    problem = cases.make_problem(case)
    operands = jax.tree.map(
        jnp.asarray, (problem.floats, problem.others, problem.cotangents)
    )
    with mock.patch.object(_backends, "choose", return_value="ffi"):
        step = cases.make_step(case, None).__wrapped__
        jaxpr = jax.make_jaxpr(step)(*operands)
    found = list(_calls_in(jaxpr.jaxpr))
    (forward,) = [c for c in found if c.results is None]
    (backward,) = [c for c in found if c.results is not None]
    return forward, backward


def gpu(arch: str) -> _tuning.Gpu:
    """The device of an architecture: "sm_90a" for example."""
    number = int(arch.removeprefix("sm_").rstrip("a"))
    shared = _tuning.MAX_SHARED_BYTES[number]
    return _tuning.Gpu(arch=number, max_shared_bytes=shared, num_multiprocessors=132)


def _calls_in(jaxpr: Any) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("fkl_attention_fwd", "fkl_attention_bwd"):
            avals = tuple(v.aval for v in eqn.invars)
            yield Call(eqn.params["spec"], avals, eqn.params.get("results"))
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _calls_in(inner)
