"""Which CUDA kernels a call gets: keys of bounded number, and plans made from them.

Sizes enter a key as powers of two, head dims as padded, so there are few keys and a
plan is made once for each. A plan is legal for every member of its key: whether rows
are aligned is not in the key but decided by the host from the real buffers
(docs/cuda.md, section 1.1), and no tile depends on it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax

from fkl_jax import _config
from fkl_jax._cuda_launch import Launch

MAX_HEAD_DIM = 256
_Tile = TypeVar("_Tile")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TuneKey:
    """What the choice of a kernel may depend on.

    Attributes:
        direction: forward or backward.
        dtype: of query, key and value.
        head_dim: padded to a multiple of 16.
        value_head_dim: likewise.
        q_seq_len: anchored, the next power of two.
        kv_seq_len: likewise.
        group: query heads per key/value head, anchored.
        num_heads: query heads of all outer elements, anchored.
        has_mask: some scores may be dead (any source: program, lengths, ids, blocks).
        has_score_program: scores go through a program.
        has_bias: a dense bias is read.
        merged_query: nothing but the query depends on which head of a group a row is
            of (`kMergedQuery` of Config).
        bias_gradient: backward adds to dbias.
        capture_gradients: backward adds to gradients of captured arrays.
        full_precision: float32 products at full accuracy, not TF32.
        deterministic: sums in a fixed order.
        arch: compute capability times ten, 80 if no GPU is here.
        max_shared_bytes: a block may use.
        num_multiprocessors: of the device.
    """

    direction: Literal["forward", "backward"]
    dtype: Literal["float32", "bfloat16", "float16"]
    head_dim: int
    value_head_dim: int
    q_seq_len: int
    kv_seq_len: int
    group: int
    num_heads: int
    has_mask: bool
    has_score_program: bool
    has_bias: bool
    merged_query: bool = True
    bias_gradient: bool = False
    capture_gradients: bool = False
    full_precision: bool = False
    deterministic: bool = False
    arch: int = 80
    max_shared_bytes: int = 101376
    num_multiprocessors: int = 108


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The kernels of a call, before mods and operands are printed into them.

    Attributes:
        headers: below `fkl_jax/device`, without those that these include.
        config: members of the `Config` struct that are the kernels' own: name, value.
        functions: per kernel of `launch`, the device function template it calls.
        launch: the launch record.
        unaligned: the plan of calls whose rows are not aligned, None: this one.
    """

    headers: tuple[str, ...]
    config: tuple[tuple[str, int | bool], ...]
    functions: tuple[str, ...]
    launch: Launch
    unaligned: "Plan | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a choice may know of a device."""

    arch: int
    max_shared_bytes: int
    num_multiprocessors: int


# Of a call that is lowered where no GPU is: what every supported one can run.
ANY_GPU = Gpu(arch=80, max_shared_bytes=101376, num_multiprocessors=108)
# Shared memory that a block may have, by compute capability; others: as ANY_GPU.
MAX_SHARED_BYTES = {
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
}
_MASKS = ("q_segment_ids", "q_seq_lengths", "kv_seq_lengths", "block_mask")


def anchored(size: int) -> int:
    """The next power of two: what sizes are replaced with in a key."""
    return 1 << max(size - 1, 0).bit_length()


def tune_key(
    spec: Any,
    operands: Mapping[str, Any],
    results: Sequence[str] | None,
    *,
    merged_query: bool,
    gpu: Gpu | None = None,
) -> TuneKey:
    """Return the key of a call.

    Args:
        spec: its `AttentionSpec`.
        operands: avals by role, vmap axes in front.
        results: of a backward call the roles of the results; None for a forward.
        merged_query: see `TuneKey`.
        gpu: the device, None for the one that is here.
    """
    query, key, value = operands["query"], operands["key"], operands["value"]
    lead = [operands[r].shape[: operands[r].ndim - spec.base_ndim(r)] for r in operands]
    vmap = [max(sizes) for sizes in zip(*lead, strict=True)]
    batch = query.shape[query.ndim - 3 - spec.num_batch_dims : query.ndim - 3]
    num_heads = query.shape[-2]
    gpu = gpu or local_gpu()
    return TuneKey(
        direction="forward" if results is None else "backward",
        dtype=str(query.dtype),  # type: ignore[arg-type]
        head_dim=_padded(query.shape[-1]),
        value_head_dim=_padded(value.shape[-1]),
        q_seq_len=anchored(query.shape[-3]),
        kv_seq_len=anchored(key.shape[-3]),
        group=anchored(num_heads // max(key.shape[-2], 1)),
        num_heads=anchored(num_heads * math.prod(vmap) * math.prod(batch)),
        has_mask=spec.mask is not None or any(r in operands for r in _MASKS),
        has_score_program=spec.score is not None,
        has_bias="bias" in operands,
        merged_query=merged_query,
        bias_gradient="bias" in (results or ()),
        capture_gradients=any(r.startswith("capture.") for r in results or ()),
        full_precision=query.dtype == "float32" and spec.precision == "highest",
        deterministic=spec.deterministic and results is not None,
        arch=gpu.arch,
        max_shared_bytes=gpu.max_shared_bytes,
        num_multiprocessors=gpu.num_multiprocessors,
    )


# Bounded: keys are few, but a process may live for months.
@functools.lru_cache(maxsize=4096)
def choose_plan(key: TuneKey) -> Plan:
    """Return the plan of a key.

    Raises:
        NotImplementedError: no kernel takes such calls; the text says why.
    """
    if max(key.head_dim, key.value_head_dim) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head dims {key.head_dim} and {key.value_head_dim} (padded) are above "
            f"{MAX_HEAD_DIM}"
        )
    # Imported when a call is lowered for a GPU: on any other machine nobody needs them.
    if key.direction == "forward":
        from ._cuda_forward import choose
    else:
        from ._cuda_backward import choose
    return choose(key)


def first_that_fits(
    key: TuneKey, tiles: Iterable[_Tile], fits: Callable[[_Tile], bool]
) -> _Tile:
    """Return the first tile that a block has the memory for.

    Raises:
        NotImplementedError: there is none.
    """
    for tile in tiles:
        if fits(tile):
            return tile
    raise NotImplementedError(
        f"head dims {key.head_dim} and {key.value_head_dim} (padded) of {key.dtype} "
        f"need more than the {key.max_shared_bytes} bytes of shared memory of this GPU"
    )


def local_gpu() -> Gpu:
    """Return the first GPU of this process, or ANY_GPU if there is none.

    With `FKL_JAX_CUDA_FAMILY=sm80` a newer GPU counts as one that has that family only.
    For calls that are lowered for `cuda` only: JAX has started every backend that it is
    going to start by then, so this starts none.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend here: an export, or a CPU-only run
        return ANY_GPU
    if not devices:
        return ANY_GPU
    gpu = _describe(devices[0])
    return gpu if _config.cuda_family() is None else dataclasses.replace(gpu, arch=80)


# --- private -------------------------------------------------------------------------


def _describe(device: Any) -> Gpu:
    try:
        major, minor = str(device.compute_capability).split(".")
    except (AttributeError, ValueError):
        return ANY_GPU
    arch = 10 * int(major) + int(minor)
    return Gpu(
        arch=arch,
        max_shared_bytes=MAX_SHARED_BYTES.get(arch, ANY_GPU.max_shared_bytes),
        num_multiprocessors=int(
            getattr(device, "core_count", ANY_GPU.num_multiprocessors)
        ),
    )


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
