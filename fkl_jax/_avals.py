"""Types of arrays on a mesh: over which axes of a `shard_map` they vary, and, if axes
of the mesh are explicit, how they are sharded."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, ManualAxisType, NamedSharding, PartitionSpec

try:
    # Private, in JAX 0.10 to 0.12: what shard_map(check_vma=...) sets. With it, a mod
    # that closes over an array of a shard_map is traced with casts that mean nothing
    # outside. Without the name such a mod needs check_vma=False.
    from jax._src.config import _check_vma
except ImportError:
    _check_vma = None  # type: ignore[assignment]

Aval = Any  # jax.core.ShapedArray
SpecEntry = Any  # of a PartitionSpec: the name of a mesh axis, a tuple of them, or None


def varying_axes(xs: Iterable[Any]) -> frozenset[Any]:
    """The axes of the surrounding `shard_map`s over which any of the arrays varies."""
    return frozenset().union(*(_varying(jax.typeof(x)) for x in xs))


def vary(x: Any, axes: frozenset[Any]) -> Any:
    """`x`, said to vary over (at least) these axes. The transpose sums over those that
    are new: that is where the gradient of a replicated operand is added up."""
    new = axes - _varying(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(new)), to="varying") if new else x


def vary_alike(xs: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays, all varying over the same axes."""
    axes = varying_axes(xs)
    return tuple(vary(x, axes) for x in xs) if axes else tuple(xs)


def shard_alike(x: jax.Array, y: Any) -> jax.Array:
    """`x`, sharded along explicit axes of the mesh as `y` is, of the same shape."""
    sharding = jax.typeof(y).sharding
    explicit = getattr(sharding.mesh, "explicit_axes", ())
    return jax.sharding.reshard(x, sharding) if explicit else x


def result(
    operands: Sequence[Aval],
    shape: Sequence[int],
    dtype: Any,
    spec: Sequence[SpecEntry],
) -> Aval:
    """Type of a result: sharded as `spec` says, varying over the same axes as the
    operands, which must agree: a primitive that took operands that do not would make
    `shard_map` lose a sum."""
    varying = {_varying(a) for a in operands}
    assert len(varying) == 1, "operands vary over different axes; see vary_alike"
    mesh = operands[0].sharding.mesh
    extra: dict[str, Any] = {}
    if varying != {frozenset()}:
        extra["manual_axis_type"] = ManualAxisType(varying=varying.pop())
    if not mesh.empty:
        extra["sharding"] = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.core.ShapedArray(tuple(shape), dtype, **extra)


def spec_of(aval: Aval) -> tuple[SpecEntry, ...]:
    """The entries of an aval's own partition spec, one per axis."""
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def plain(aval: Aval) -> Aval:
    """The aval as in a program for one device."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def are_about_mesh() -> bool:
    """True where the types of arrays say something about a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    checked = _check_vma is None or _check_vma.value
    return bool(mesh.explicit_axes or (mesh.manual_axes and checked))


def off_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context in which traced code knows of no mesh."""
    known = not jax.sharding.get_abstract_mesh().empty
    return _off_mesh() if known else contextlib.nullcontext()


# --- private -------------------------------------------------------------------------


@contextlib.contextmanager
def _off_mesh() -> Any:
    unchecked = contextlib.nullcontext() if _check_vma is None else _check_vma(False)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), unchecked:
        yield


def _varying(aval: Aval) -> frozenset[Any]:
    return aval.manual_axis_type.varying
