"""How the kernels of one CUDA call are launched: what `_codegen.py` hands to `_ffi.py`.

The numbers travel in the custom call as the attribute `cuda_launch`; docs/cuda.md
section 1.1 is the format, `ffi/cuda/cuda_launch.h` its other reader.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

_FORMAT_VERSION = 2
# Every part of the workspace starts at a multiple of this.
PART_BYTES = 256
_ROWS = {None: 0, "q": 1, "kv": 2, "packed_q": 3}
_HEADS = {None: 0, "q": 1, "kv": 2}
_PER_OUTER, _PER_SPLIT = 1, 2
_ARRAYS = ("query", "key", "value", "out", "dout", "dquery", "dkey", "dvalue")
_MAX_TENSOR_MAPS = 8  # kMaxTensorMaps of device/attention/params.cuh


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kernel: its grid has `ceil(rows / tile) * heads * outer * splits` blocks.

    Attributes:
        name: of the `extern "C"` function in the glue.
        threads: per block.
        shared_bytes: dynamic shared memory.
        rows: what is tiled: query rows, keys, query rows times group, or one.
        tile: rows per block.
        heads: query heads, key/value heads, or one.
        per_outer: once per element of `*V, *B`.
        per_split: once per split.
        max_blocks: the grid is cut to this many; None if every tile has its block.
        blocks_per_processor: that the compiler must leave room for; None if it decides.
    """

    name: str
    threads: int
    shared_bytes: int = 0
    rows: Literal["q", "kv", "packed_q"] | None = None
    tile: int = 1
    heads: Literal["q", "kv"] | None = None
    per_outer: bool = True
    per_split: bool = False
    max_blocks: int | None = None
    blocks_per_processor: int | None = None

    def __post_init__(self) -> None:
        assert self.max_blocks is None or self.max_blocks > 0, self
        assert self.name.isidentifier(), self.name
        assert 0 < self.threads <= 1024 and self.threads % 32 == 0, self.threads
        assert self.shared_bytes >= 0 and self.tile > 0, self


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """How TMA sees an array: boxes of rows of one head.

    Attributes:
        array: its role, with `d` in front if it is a gradient.
        rows: of a box.
        columns: of a box; their 128, 64 or 32 bytes are the span of the swizzle.
    """

    array: str
    rows: int
    columns: int

    def __post_init__(self) -> None:
        assert self.array in _ARRAYS and 0 < self.rows <= 256 and self.columns > 0, self


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The kernels of a call in launch order, and what the workspace must hold.

    Attributes:
        kernels: in launch order.
        num_splits: of the keys, forward; 1 is none.
        q_tile: the backward's row vectors are padded to a multiple of it.
        accumulator_head_dim: columns of the float accumulator of dquery, 0 for none.
        scratch_bytes: zeroed memory for the kernels' own use.
        tensor_maps: what the kernels read and write by TMA, `TensorMaps` in this order.
        unaligned: of calls with arrays whose rows are not aligned (`FKL_ALIGNED` 0),
            None: the same. TMA cannot read these.
    """

    kernels: tuple[Kernel, ...]
    num_splits: int = 1
    q_tile: int = 1
    accumulator_head_dim: int = 0
    scratch_bytes: int = 0
    tensor_maps: tuple[TensorMap, ...] = ()
    unaligned: "Launch | None" = None

    def __post_init__(self) -> None:
        assert self.kernels and self.num_splits > 0 and self.q_tile > 0, self
        assert len(self.tensor_maps) <= _MAX_TENSOR_MAPS, self
        assert self.unaligned is None or self.unaligned.unaligned is None, self
        assert self.accumulator_head_dim >= 0 and self.scratch_bytes >= 0, self

    @property
    def names(self) -> str:
        """The attribute `cuda_kernels`."""
        return " ".join(k.name for launch in self.classes for k in launch.kernels)

    @property
    def classes(self) -> "tuple[Launch, ...]":
        """For aligned rows, and for others where that is another launch."""
        return (self, self.unaligned) if self.unaligned else (self,)

    def encode(self) -> np.ndarray:
        """The attribute `cuda_launch`."""
        numbers = [_FORMAT_VERSION, len(self.classes)]
        for launch in self.classes:
            numbers += launch._record()
        return np.array(numbers, np.int32)

    def _record(self) -> list[int]:
        numbers = [
            len(self.kernels),
            self.num_splits,
            self.q_tile,
            self.accumulator_head_dim,
            -(-self.scratch_bytes // PART_BYTES),
            len(self.tensor_maps),
        ]
        for k in self.kernels:
            repeat = _PER_OUTER * k.per_outer | _PER_SPLIT * k.per_split
            numbers += [k.threads, k.shared_bytes, _ROWS[k.rows], k.tile]
            numbers += [_HEADS[k.heads], repeat, k.max_blocks or 0]
        for m in self.tensor_maps:
            numbers += [_ARRAYS.index(m.array), m.rows, m.columns]
        return numbers


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Glue:
    """A generated text and how its kernels are launched."""

    text: str
    launch: Launch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes of a call that its workspace depends on."""

    num_outer: int
    num_q_heads: int
    q_seq_len: int
    value_head_dim: int

    @classmethod
    def of_out(cls, shape: Sequence[int]) -> "Sizes":
        """From the shape of `out`, `(*V, *B, T, N, Hv)`."""
        *outer, t, n, hv = shape
        return cls(
            num_outer=math.prod(outer), num_q_heads=n, q_seq_len=t, value_head_dim=hv
        )


def forward_workspace_bytes(launch: Launch, sizes: Sizes) -> int:
    """Size of the forward's workspace; 0: the call needs none."""
    return max(_forward_bytes(each, sizes) for each in launch.classes)


def backward_workspace_bytes(
    launch: Launch, sizes: Sizes, results: Sequence[Any]
) -> int:
    """Size of the backward's workspace."""
    return max(_backward_bytes(each, sizes, results) for each in launch.classes)


def _forward_bytes(launch: Launch, sizes: Sizes) -> int:
    rows = sizes.num_outer * sizes.num_q_heads * sizes.q_seq_len
    parts = []
    if launch.num_splits > 1:
        parts += [4 * launch.num_splits * rows * sizes.value_head_dim]
        parts += [4 * launch.num_splits * rows]
    return _sum_of_parts([*parts, launch.scratch_bytes])


def _backward_bytes(launch: Launch, sizes: Sizes, results: Sequence[Any]) -> int:
    padded_rows = -(-sizes.q_seq_len // launch.q_tile) * launch.q_tile
    rows = sizes.num_outer * sizes.num_q_heads * padded_rows
    parts = [4 * rows * launch.accumulator_head_dim, 4 * rows, 4 * rows]
    if "scale" in results:
        parts.append(4 * sizes.num_outer)
    return _sum_of_parts([*parts, launch.scratch_bytes])


def _sum_of_parts(parts: Sequence[int]) -> int:
    return sum(-(-p // PART_BYTES) * PART_BYTES for p in parts)
