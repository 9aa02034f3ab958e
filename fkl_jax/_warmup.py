"""Compile kernels ahead of their first use: `python -m fkl_jax warmup`.

The texts are those that the traced calls themselves lead to, so that the entries in the
cache are those that the calls will look for. Only the compiler runs, on the CPU.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from ._cuda_launch import Glue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A call to compile for; `head_dim` is that of the values too.

    Attributes:
        batch, q_seq_len, kv_seq_len, num_q_heads, num_kv_heads, head_dim: sizes.
        dtype: of query, key and value.
        causal: as in `attention`.
        backward: its gradients too.
    """

    batch: int = 1
    q_seq_len: int = 2048
    kv_seq_len: int = 2048
    num_q_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 128
    dtype: str = "bfloat16"
    causal: bool = True
    backward: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One text for the compiler."""

    glue: str
    arch: str
    aligned: bool = True


def common_shapes() -> list[Shape]:
    """What is compiled if no file says otherwise: training and decoding of usual
    transformers."""
    training = [
        Shape(head_dim=d, num_kv_heads=kv, causal=causal)
        for d in (64, 128)
        for kv in (16, 4)
        for causal in (True, False)
    ]
    decoding = [
        Shape(
            q_seq_len=1,
            num_kv_heads=kv,
            head_dim=d,
            kv_seq_len=8192,
            causal=False,
            backward=False,
        )
        for d in (64, 128)
        for kv in (16, 4)
    ]
    return [*training, *decoding]


def read_shapes(path: str) -> list[Shape]:
    """Read a JSON list of objects with the fields of `Shape`; those left out have their
    defaults.

    Raises:
        ValueError: the file has something else in it.
    """
    with open(path, encoding="utf-8") as f:
        rows = json.load(f)
    known = {f.name: type(f.default) for f in dataclasses.fields(Shape)}
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{path} must hold a JSON list of objects")
    for row in rows:
        for name, value in row.items():
            if name not in known:
                raise ValueError(
                    f"{path}: unknown field {name!r}; known are {', '.join(known)}"
                )
            if type(value) is not known[name]:
                raise ValueError(
                    f"{path}: {name} is {value!r}, not a {known[name].__name__}"
                )
    return [Shape(**row) for row in rows]


def local_arch() -> str:
    """The architecture of the GPU here; RuntimeError if there is none."""
    from . import _ext

    devices = _ext.cuda_devices()
    if not devices:
        raise RuntimeError("the NVIDIA driver finds no GPU")
    return _ext.cuda_arch_name(devices[0]["arch"])


def jobs(shapes: Iterable[Shape], arch: str) -> tuple[list[Job], list[str]]:
    """Return the distinct texts of the calls, and why some calls have none."""
    texts: dict[str, None] = {}
    refusals: dict[str, None] = {}
    for shape in shapes:
        try:
            texts.update(dict.fromkeys(_glues(shape)))
        except NotImplementedError as refusal:
            refusals[f"{shape}: {refusal}"] = None
    return [Job(text, arch) for text in texts], list(refusals)


def run(
    shapes: Iterable[Shape], arch: str, workers: int | None = None
) -> tuple[int, list[str]]:
    """Compile into the cache; return how many texts there were and what failed."""
    todo, failures = jobs(shapes, arch)
    if not todo:
        return 0, failures
    workers = min(workers or os.cpu_count() or 1, len(todo))
    # Not forked: this process has threads of JAX's, perhaps a CUDA context.
    context = multiprocessing.get_context("spawn")
    with (
        _quiet_children(),
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        running = [pool.submit(compile_job, job) for job in todo]
        for done in _progress(as_completed(running), len(running)):
            if error := done.result():
                failures.append(error)
    return len(todo), failures


def glues_of(jaxpr: Any) -> Iterator[Glue]:
    """What the calls in a jaxpr are lowered to for CUDA."""
    from . import _codegen, _primitives

    for eqn in jaxpr.eqns:
        avals = [x.aval for x in eqn.invars]
        if eqn.primitive is _primitives.fwd_p:
            yield _codegen.forward_glue(eqn.params["spec"], avals)
        elif eqn.primitive is _primitives.bwd_p:
            spec, results = eqn.params["spec"], eqn.params["results"]
            yield _codegen.backward_glue(spec, avals, results)
        for inner in eqn.params.values():
            # A closed jaxpr has one inside; in newer JAX an open one is its own.
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from glues_of(inner)


def compile_job(job: Job) -> str:
    """In a worker: compile into the cache; return an error text, or an empty one."""
    from . import _ext

    try:
        _ext.cached_cubin(job.glue, job.arch, job.aligned)
    except RuntimeError as error:
        return str(error)
    return ""


# --- private -------------------------------------------------------------------------


def _glues(shape: Shape) -> list[str]:
    """The texts of the kernels of a call and its gradients."""
    import jax
    import jax.numpy as jnp

    from ._api import attention

    def array(length: int, heads: int) -> Any:
        dims = (shape.batch, length, heads, shape.head_dim)
        return jax.ShapeDtypeStruct(dims, shape.dtype)

    def call(*qkv: jax.Array) -> jax.Array:
        return attention(*qkv, causal=shape.causal, implementation="ffi")

    def gradients(*qkv: jax.Array) -> Any:
        out, pullback = jax.vjp(call, *qkv)
        return out, pullback(jnp.ones_like(out))

    traced = jax.make_jaxpr(gradients if shape.backward else call)(
        array(shape.q_seq_len, shape.num_q_heads),
        array(shape.kv_seq_len, shape.num_kv_heads),
        array(shape.kv_seq_len, shape.num_kv_heads),
    )
    return [glue.text for glue in glues_of(traced.jaxpr)]


@contextlib.contextmanager
def _quiet_children() -> Iterator[None]:
    """The workers import JAX but use no device: they must not take memory of a GPU that
    somebody trains on."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


def _progress(done: Iterable[Any], total: int) -> Iterable[Any]:
    """With a bar if tqdm is installed, else lines."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return _counted(done, total)
    bar: Iterable[Any] = tqdm(done, total=total, unit="kernel")
    return bar


def _counted(done: Iterable[Any], total: int) -> Iterator[Any]:
    for number, item in enumerate(done, 1):
        print(f"compiled {number} of {total}", file=sys.stderr, flush=True)
        yield item
