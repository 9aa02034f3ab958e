"""Which forward kernels a call gets.

Few query rows go to the decoding kernel, which splits the keys over blocks if there
are too few of them; everything else to a tiled kernel: that of compute capability 9.0
where it can be used, else that of 8.0 and newer.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TypeVar

from fkl_jax._cuda_launch import Kernel, Launch, TensorMap
from fkl_jax._tuning import MAX_HEAD_DIM, Plan, TuneKey, first_that_fits

_MAX_SPLITS = 128  # kMaxSplits of device/attention/params.cuh
_STATE_BYTES = 1024  # kMaxStateBytes of device/kernels/forward_sm80.cuh
_WALK_BYTES = 64  # kMaxWalkBytes
_WORK_BYTES = 1024  # kMaxWorkBytes of device/kernels/forward_sm90.cuh
_SWIZZLE_COLUMNS, _SWIZZLE_BYTES, _SWIZZLE_ALIGNMENT = 64, 128, 1024
_WARPGROUP_ROWS, _WARPGROUP_THREADS = 64, 128
# Below, most of what the tensor cores of 9.0 would multiply is padding.
_MIN_HEAD_DIM_90 = 48
_COMBINE_WARPS = 4  # kCombineWarps of device/kernels/combine_splits.cuh
# Of query rows times heads that share keys; above, tiles of the other kernel are full.
_MAX_DECODE_ROWS = 64
# A part of the keys is at least this long: merging costs about as much as reading 64.
_MIN_SPLIT_KEYS = 256
# Shared memory of a multiprocessor that a block leaves to the system.
_RESERVED_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTile:
    """Tile of `device/kernels/forward_sm80.cuh`.

    Attributes:
        q: query rows, 16 or 32 per warp.
        kv: keys.
        warps: of a block.
        stages: tiles of keys and values in shared memory.
        query_in_registers: else Q is read from shared memory for every key tile.
    """

    q: int
    kv: int
    warps: int
    stages: int
    query_in_registers: bool = False

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int) -> int:
        query = self.q * head_dim * itemsize
        keys = self.stages * self.kv * (head_dim + value_head_dim) * itemsize
        state = -(-4 * self.warps // 16) * 16 + _STATE_BYTES + _WALK_BYTES * self.warps
        return query + keys + state


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTile:
    """Tile of `device/kernels/decode_sm80.cuh`.

    Attributes:
        q: query rows times heads of a block, a multiple of 16.
        kv: keys of all warps together, 16 or 32 each.
        warps: of a block.
        stages: slices of keys and values in flight, and the one at work.
        query_in_registers: as above.
    """

    q: int
    kv: int
    warps: int
    stages: int
    query_in_registers: bool = False

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int) -> int:
        keys = self.stages * self.kv * (head_dim + value_head_dim) * itemsize
        load = self.q * head_dim * itemsize + keys
        merge = 4 * self.warps * self.q * (value_head_dim + 8 + 2)
        return max(load, merge)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTile90:
    """Tile of `device/kernels/forward_sm90.cuh`.

    Attributes:
        q: query rows, 64 per warpgroup of consumers.
        kv: keys.
        stages: tiles of keys and values in shared memory.
        out_buffer: the result has memory of its own, so that Q of the next tile is
            loaded during the last products of this one.
        persistent: blocks fetch query tiles until there is none; needs `out_buffer`.
    """

    q: int
    kv: int
    stages: int
    out_buffer: bool = True
    persistent: bool = True

    @property
    def threads(self) -> int:
        return (self.q // _WARPGROUP_ROWS + 1) * _WARPGROUP_THREADS

    def shared_bytes(self, head_dim: int, value_head_dim: int) -> int:
        head, value = (
            -(-dim // _SWIZZLE_COLUMNS) * _SWIZZLE_BYTES
            for dim in (head_dim, value_head_dim)
        )
        tiles = self.q * head + self.stages * self.kv * (head + value)
        out = self.q * value if self.out_buffer else 0
        works = 2 if self.persistent else 1
        barriers = 2 * self.q // _WARPGROUP_ROWS + 5 * self.stages + 2 * works
        words = -(-8 * (barriers + self.stages) // 16) * 16 + 32 * self.stages
        return _SWIZZLE_ALIGNMENT + tiles + out + works * _WORK_BYTES + words


_Tile = TypeVar("_Tile", ForwardTile, DecodeTile)
_Shape = tuple[int, int, int, int, bool]


def _forward(*tiles: _Shape) -> tuple[ForwardTile, ...]:
    return tuple(
        ForwardTile(q=q, kv=kv, warps=w, stages=s, query_in_registers=r)
        for q, kv, w, s, r in tiles
    )


def _decode(*tiles: _Shape) -> tuple[DecodeTile, ...]:
    return tuple(
        DecodeTile(q=q, kv=kv, warps=w, stages=s, query_in_registers=r)
        for q, kv, w, s, r in tiles
    )


# By bytes of an element and the wider of the two head dims: the first that fits shared
# memory is taken. Each list ends with what fits any GPU. None spills (64 keys at 128
# columns would), but at full accuracy with 256 columns.
_FORWARD_TILES: dict[int, tuple[tuple[int, tuple[ForwardTile, ...]], ...]] = {
    2: (
        (64, _forward((128, 64, 4, 2, False))),
        (128, _forward((128, 32, 4, 2, False))),
        (192, _forward((128, 64, 8, 2, False), (64, 32, 4, 2, False))),
        (256, _forward((128, 32, 8, 2, False), (64, 32, 4, 1, False))),
    ),
    4: (
        (64, _forward((128, 32, 8, 2, False))),
        (128, _forward((128, 32, 8, 2, False), (64, 32, 4, 1, False))),
        (256, _forward((64, 32, 4, 2, False), (64, 16, 4, 1, False))),
    ),
}
# With a score program or a bias: 16 rows per warp leave registers for them.
_MODIFIED_TILES: dict[int, tuple[tuple[int, tuple[ForwardTile, ...]], ...]] = {
    2: (
        (64, _forward((128, 64, 8, 2, False))),
        (128, _forward((128, 64, 8, 2, False), (128, 32, 8, 2, False))),
        *_FORWARD_TILES[2][2:],
    ),
    4: _FORWARD_TILES[4],
}
# By the wider of the two head dims, without and with a bias (its loads take registers).
# Accumulators, two sets of P and the registers of the producer fill the register file.
_FORWARD_TILES_90: tuple[tuple[int, ForwardTile90, ForwardTile90], ...] = (
    (
        64,
        ForwardTile90(q=192, kv=112, stages=4),
        ForwardTile90(q=192, kv=64, stages=4),
    ),
    (
        96,
        ForwardTile90(q=128, kv=144, stages=2),
        ForwardTile90(q=128, kv=64, stages=4),
    ),
    (
        128,
        ForwardTile90(q=128, kv=128, stages=2),
        ForwardTile90(q=128, kv=64, stages=4),
    ),
    (
        192,
        ForwardTile90(q=128, kv=112, stages=2),
        ForwardTile90(q=128, kv=64, stages=3, out_buffer=False),
    ),
    (
        256,
        ForwardTile90(q=128, kv=80, stages=2, out_buffer=False),
        ForwardTile90(q=128, kv=64, stages=2, out_buffer=False),
    ),
)
_DECODE_TILES: dict[int, tuple[tuple[int, tuple[DecodeTile, ...]], ...]] = {
    2: (
        (64, _decode((16, 128, 4, 3, True))),
        (128, _decode((16, 64, 4, 3, True), (16, 64, 4, 2, True))),
        (256, _decode((16, 64, 4, 3, False), (16, 32, 2, 2, False))),
    ),
    4: (
        (64, _decode((16, 64, 4, 3, False))),
        (128, _decode((16, 64, 4, 3, False), (16, 32, 2, 2, False))),
        (256, _decode((16, 32, 2, 3, False), (16, 16, 1, 2, False))),
    ),
}


def choose(key: TuneKey) -> Plan:
    """The kernels for a call.

    Raises:
        NotImplementedError: the reason why the kernels cannot take it.
    """
    packed = key.group if key.merged_query else 1
    if key.q_seq_len * packed <= _MAX_DECODE_ROWS:
        return decode_plan(key, _first_that_fits(key, decode_tiles(key)))
    plan = forward_plan(key, _first_that_fits(key, forward_tiles(key)))
    tile = forward_tile_90(key)
    return plan if tile is None else forward_plan_90(key, tile, unaligned=plan)


def forward_plan(key: TuneKey, tile: ForwardTile) -> Plan:
    """The plan of the tiled kernel."""
    kernel = Kernel(
        name="forward",
        threads=32 * tile.warps,
        shared_bytes=_shared_bytes(key, tile),
        rows="q",
        tile=tile.q,
        heads="q",
    )
    return Plan(
        headers=("kernels/forward_sm80.cuh",),
        config=_config(tile, num_splits=1),
        functions=("forward_sm80",),
        launch=Launch(kernels=(kernel,)),
    )


def forward_plan_90(key: TuneKey, tile: ForwardTile90, unaligned: Plan) -> Plan:
    """The plan of the tiled kernel of compute capability 9.0.

    TMA reads what is aligned; `unaligned` is for the other calls.
    """
    kernel = Kernel(
        name="forward",
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(key.head_dim, key.value_head_dim),
        rows="q",
        tile=tile.q,
        heads="q",
        max_blocks=key.num_multiprocessors if tile.persistent else None,
        blocks_per_processor=1,
    )
    boxes = (
        ("query", _WARPGROUP_ROWS),
        ("key", tile.kv),
        ("value", tile.kv),
        ("out", _WARPGROUP_ROWS),
    )
    return Plan(
        headers=("kernels/forward_sm90.cuh",),
        config=(
            ("kQTile", tile.q),
            ("kKvTile", tile.kv),
            ("kNumStages", tile.stages),
            ("kHasOutBuffer", tile.out_buffer),
            ("kIsPersistent", tile.persistent),
        ),
        functions=("forward_sm90",),
        launch=Launch(
            kernels=(kernel,),
            scratch_bytes=4 if tile.persistent else 0,
            tensor_maps=tuple(
                TensorMap(array=array, rows=rows, columns=_SWIZZLE_COLUMNS)
                for array, rows in boxes
            ),
        ),
        unaligned=unaligned,
    )


def decode_plan(key: TuneKey, tile: DecodeTile, num_splits: int | None = None) -> Plan:
    """The plan of the decoding kernel; `num_splits` None: enough to fill the GPU."""
    if num_splits is None:
        num_splits = _num_splits(key, tile)
    kernel = Kernel(
        name="decode",
        threads=32 * tile.warps,
        shared_bytes=_shared_bytes(key, tile),
        rows="packed_q" if key.merged_query else "q",
        tile=tile.q,
        heads="kv" if key.merged_query else "q",
        per_split=True,
    )
    combine = Kernel(
        name="combine",
        threads=32 * _COMBINE_WARPS,
        shared_bytes=4 * _COMBINE_WARPS * _MAX_SPLITS,
        rows="q",
        tile=_COMBINE_WARPS,
        heads="q",
    )
    is_split = num_splits > 1
    combine_header = ("kernels/combine_splits.cuh",) if is_split else ()
    return Plan(
        headers=("kernels/decode_sm80.cuh", *combine_header),
        config=_config(tile, num_splits),
        functions=("decode_sm80", "combine_splits") if is_split else ("decode_sm80",),
        launch=Launch(
            kernels=(kernel, combine) if is_split else (kernel,), num_splits=num_splits
        ),
    )


def forward_tiles(key: TuneKey) -> Iterator[ForwardTile]:
    """Tiles of the tiled kernel for a key, the best first."""
    is_modified = key.has_score_program or key.has_bias
    tables = _MODIFIED_TILES if is_modified else _FORWARD_TILES
    wider = max(key.head_dim, key.value_head_dim)
    for largest, tiles in tables[_itemsize(key)]:
        if wider <= largest:
            # Operands in two parts leave no registers for many keys.
            is_tight = key.full_precision and largest == MAX_HEAD_DIM
            yield from tiles[-1:] if is_tight else tiles


def forward_tile_90(key: TuneKey) -> ForwardTile90 | None:
    """The tile of the kernel of 9.0, None: it cannot take the call."""
    wider = max(key.head_dim, key.value_head_dim)
    if key.arch != 90 or _itemsize(key) != 2 or wider < _MIN_HEAD_DIM_90:
        return None
    for largest, tile, with_bias in _FORWARD_TILES_90:
        if wider > largest:
            continue
        tile = with_bias if key.has_bias else tile
        # A wide result fits in the place of a wide query only.
        fits = tile.shared_bytes(key.head_dim, key.value_head_dim)
        if tile.out_buffer and fits > key.max_shared_bytes:
            tile = dataclasses.replace(tile, out_buffer=False)
        if not tile.out_buffer and key.value_head_dim > _columns(key.head_dim):
            return None
        num_tiles = -(-key.q_seq_len // tile.q) * key.num_heads
        persistent = tile.out_buffer and num_tiles > key.num_multiprocessors
        tile = dataclasses.replace(tile, persistent=persistent)
        fits = tile.shared_bytes(key.head_dim, key.value_head_dim)
        return tile if fits <= key.max_shared_bytes else None
    return None


def decode_tiles(key: TuneKey) -> Iterator[DecodeTile]:
    """Tiles of the decoding kernel for a key, the best first."""
    wider = max(key.head_dim, key.value_head_dim)
    for largest, tiles in _DECODE_TILES[_itemsize(key)]:
        if wider <= largest:
            yield from tiles


def _num_splits(key: TuneKey, tile: DecodeTile) -> int:
    """The fewest parts of the keys that nearly fill the last round of blocks."""
    packed = key.group if key.merged_query else 1
    heads = key.num_heads // packed
    blocks = max(heads, 1) * -(-key.q_seq_len * packed // tile.q)
    block_bytes = _shared_bytes(key, tile) + _RESERVED_BYTES
    # A multiprocessor has little more than one block may use.
    per_processor = max((key.max_shared_bytes + _RESERVED_BYTES) // block_bytes, 1)
    slots = key.num_multiprocessors * min(per_processor, 4)
    most = min(_MAX_SPLITS, max(key.kv_seq_len // _MIN_SPLIT_KEYS, 1))

    def busy(splits: int) -> float:
        rounds = -(-blocks * splits // slots)
        return blocks * splits / (rounds * slots)

    best = max(busy(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if busy(s) >= 0.9 * best)


def _config(
    tile: ForwardTile | DecodeTile, num_splits: int
) -> tuple[tuple[str, int | bool], ...]:
    return (
        ("kQTile", tile.q),
        ("kKvTile", tile.kv),
        ("kNumWarps", tile.warps),
        ("kNumStages", tile.stages),
        ("kQueryInRegisters", tile.query_in_registers),
        ("kIsSplit", num_splits > 1),
    )


def _columns(dim: int) -> int:
    return -(-dim // _SWIZZLE_COLUMNS) * _SWIZZLE_COLUMNS


def _itemsize(key: TuneKey) -> int:
    return 4 if key.dtype == "float32" else 2


def _shared_bytes(key: TuneKey, tile: ForwardTile | DecodeTile) -> int:
    return tile.shared_bytes(key.head_dim, key.value_head_dim, _itemsize(key))


def _first_that_fits(key: TuneKey, tiles: Iterable[_Tile]) -> _Tile:
    return first_that_fits(
        key, tiles, lambda tile: _shared_bytes(key, tile) <= key.max_shared_bytes
    )
