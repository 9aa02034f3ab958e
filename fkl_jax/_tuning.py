"""Which CUDA kernels a call gets: keys of bounded number, and plans made from them."""

import dataclasses
from typing import Literal

from fkl_jax._cuda_launch import Launch


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
    """

    headers: tuple[str, ...]
    config: tuple[tuple[str, int | bool], ...]
    functions: tuple[str, ...]
    launch: Launch
