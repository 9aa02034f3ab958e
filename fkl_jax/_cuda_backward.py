"""Which backward kernels a call gets: of family sm90 on compute capability 9.0 if TMA
and wgmma can take it, else of sm80.

The main kernel owns a tile of keys and goes through the queries; dquery is added up by
atomics, or, for deterministic calls, computed by a kernel of its own that owns queries.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TypeVar

from fkl_jax._cuda_launch import Kernel, Launch, TensorMap
from fkl_jax._tuning import Plan, TuneKey, first_that_fits

# Accumulators of a thread: what is left of 255 registers holds operands and addresses.
_MAX_ACCUMULATORS = 192
_ROW_THREADS = 128  # kBackwardRowThreads
_STATISTICS_BYTES = 2 * 4  # lse_log2 and delta of a query row
_SWIZZLE_BYTES = 128  # of a row of a chunk of 64 columns, in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeysTile:
    """Tile of the main kernel, `device/kernels/backward_keys_sm80.cuh`.

    Attributes:
        q: query rows.
        kv: keys.
        warps: a multiple of `kv / 16`; what is beyond shares keys and splits columns.
        stages: tiles of Q and dO in flight.
        shares: P and dS use one tile of shared memory, one after the other.
    """

    q: int
    kv: int
    warps: int
    stages: int
    shares: bool = False

    @property
    def split(self) -> int:
        """Warps that share 16 keys."""
        return self.warps * 16 // self.kv

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int) -> int:
        row = (head_dim + value_head_dim) * itemsize
        score_tiles = 2 if self.split > 1 and not self.shares else 1
        scores = score_tiles * self.q * self.kv * itemsize
        query_bytes = self.stages * self.q * (row + _STATISTICS_BYTES)
        return self.kv * row + query_bytes + scores

    def accumulators(self, head_dim: int, value_head_dim: int) -> int:
        columns = [-(-d // 16 // self.split) for d in (head_dim, value_head_dim)]
        scores = 2 * (self.q // self.split // 16)
        return 8 * (scores + sum(columns))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueriesTile:
    """Tile of `device/kernels/backward_queries_sm80.cuh`: 16 query rows per warp."""

    q: int
    kv: int
    stages: int

    def shared_bytes(self, head_dim: int, value_head_dim: int, itemsize: int) -> int:
        row = (head_dim + value_head_dim) * itemsize
        return (self.q + self.stages * self.kv) * row + self.kv

    def accumulators(self, head_dim: int, value_head_dim: int) -> int:
        return self.kv + head_dim // 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeysTileSm90:
    """Tile of `device/kernels/backward_keys_sm90.cuh`.

    Attributes:
        q: query rows.
        kv: keys.
        shares_keys: both warpgroups own the same 64 keys and half of the columns.
        dquery_stages: parts of dquery on their way to global memory.
        stages: tiles of Q and dO in flight.
        section_megabytes: what the queries of the heads that run together may take of
            the L2 cache.
    """

    q: int
    kv: int
    shares_keys: bool = False
    dquery_stages: int = 2
    stages: int = 2
    section_megabytes: int = 32

    def shared_bytes(self, head_dim: int, value_head_dim: int) -> int:
        row = sum(-(-d // 64) * _SWIZZLE_BYTES for d in (head_dim, value_head_dim))
        tiles = (self.kv + self.stages * self.q) * row
        statistics = self.stages * self.q * _STATISTICS_BYTES
        # dS, with shares_keys also P; two of each, in chunks of 64 keys.
        scores = 2 * self.q * self.kv * 2 * (2 if self.shares_keys else 1)
        dquery = 0 if self.shares_keys else 2 * self.dquery_stages * 64 * 64 * 4
        barriers = 8 * (2 + 4 * self.stages)
        infos = 16 + 8 * (self.stages + 2 * self.dquery_stages)
        return tiles + scores + dquery + statistics + barriers + infos

    def accumulator_columns(self, head_dim: int) -> int:
        """What `DqueryOrderSm90` of backward_rows_sm90.cuh says."""
        if self.shares_keys:
            return head_dim
        return 64 if self.q == 128 else 96 if head_dim <= 96 else 128


_Tile = TypeVar("_Tile", KeysTile, QueriesTile)


def _keys(*tiles: tuple[int, int, int, int]) -> tuple[KeysTile, ...]:
    return tuple(KeysTile(q=q, kv=k, warps=w, stages=s) for q, k, w, s in tiles)


# By bytes of an element and the wider of the two head dims: the first that fits is
# taken. Each list ends with what fits any GPU.
_KEYS_TILES: dict[int, tuple[tuple[int, tuple[KeysTile, ...]], ...]] = {
    2: (
        (64, _keys((128, 128, 8, 2), (128, 128, 8, 1))),
        (96, _keys((64, 128, 8, 2), (64, 128, 8, 1))),
        (128, _keys((64, 128, 8, 2), (64, 128, 8, 1), (32, 128, 8, 1))),
        (192, _keys((64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 1))),
        (256, _keys((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 1))),
    ),
    4: (
        (64, _keys((64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 1))),
        (128, _keys((64, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 1))),
        (
            256,
            (
                *_keys((32, 64, 8, 1), (32, 32, 4, 1)),
                KeysTile(q=32, kv=16, warps=2, stages=1, shares=True),
            ),
        ),
    ),
}
_QUERIES_TILES = tuple(
    QueriesTile(q=q, kv=kv, stages=stages)
    for q, kv, stages in (
        (128, 64, 2),
        (128, 64, 1),
        (64, 64, 2),
        (64, 64, 1),
        (64, 32, 1),
        (32, 32, 1),
        (32, 16, 1),
    )
)


# By the wider of the two head dims. Measured on an H200 in front of other tiles.
_KEYS_TILES_SM90 = (
    (64, KeysTileSm90(q=128, kv=128, dquery_stages=1)),
    (128, KeysTileSm90(q=64, kv=128)),
    (256, KeysTileSm90(q=64, kv=64, shares_keys=True, dquery_stages=1)),
)
_SM90_THREADS = 3 * 128
# Narrower heads would be computed as if they had 64 columns.
_SM90_MIN_HEAD_DIM = 48


def choose(key: TuneKey) -> Plan:
    """The kernels for a call.

    Raises:
        NotImplementedError: the reason why the kernels cannot take it.
    """
    if key.deterministic and (key.bias_gradient or key.capture_gradients):
        what = "the bias" if key.bias_gradient else "captured arrays"
        raise NotImplementedError(
            f"deterministic gradients of {what}: the kernels add them up by atomics"
        )
    plan = _sm80(key)
    return _sm90(key, plan) if _is_for_sm90(key) else plan


def _is_for_sm90(key: TuneKey) -> bool:
    return (
        key.arch == 90
        and _itemsize(key) == 2
        and not key.deterministic
        and min(key.head_dim, key.value_head_dim) >= _SM90_MIN_HEAD_DIM
    )


def _sm90(key: TuneKey, unaligned: Plan) -> Plan:
    wider = max(key.head_dim, key.value_head_dim)
    tile = next(t for largest, t in _KEYS_TILES_SM90 if wider <= largest)
    preprocess = Kernel(
        name="backward_preprocess",
        threads=_ROW_THREADS,
        rows="q",
        tile=tile.q,
        heads="q",
    )
    kernels = (
        preprocess,
        Kernel(
            name="backward_keys",
            threads=_SM90_THREADS,
            shared_bytes=tile.shared_bytes(key.head_dim, key.value_head_dim),
            rows="kv",
            tile=tile.kv,
            heads="kv",
            blocks_per_processor=1,
        ),
        dataclasses.replace(
            preprocess, name="backward_finish", shared_bytes=4 * _ROW_THREADS // 32
        ),
    )
    # One word per query tile: some of its rows must not be read.
    num_q_tiles = key.num_heads * -(-key.q_seq_len // tile.q)
    boxes = {"query": tile.q, "key": tile.kv, "value": tile.kv, "dout": tile.q}
    return Plan(
        headers=("kernels/backward_keys_sm90.cuh",),
        config=(
            ("kQTile", tile.q),
            ("kKvTile", tile.kv),
            ("kNumStages", tile.stages),
            ("kDqueryStages", tile.dquery_stages),
            ("kSharesKeys", tile.shares_keys),
            ("kSectionMegabytes", tile.section_megabytes),
        ),
        functions=(
            "backward_preprocess_sm90",
            "backward_keys_sm90",
            "backward_finish_sm90",
        ),
        launch=Launch(
            kernels=kernels,
            q_tile=tile.q,
            accumulator_head_dim=tile.accumulator_columns(key.head_dim),
            scratch_bytes=4 * num_q_tiles,
            tensor_maps=tuple(
                TensorMap(array=array, rows=rows, columns=64)
                for array, rows in boxes.items()
            ),
        ),
        unaligned=unaligned,
    )


def _sm80(key: TuneKey) -> Plan:
    tile = _first_that_fits(key, keys_tiles(key))
    queries = _first_that_fits(key, _QUERIES_TILES) if key.deterministic else None
    sizes = key.head_dim, key.value_head_dim, _itemsize(key)
    preprocess = Kernel(
        name="backward_preprocess",
        threads=_ROW_THREADS,
        rows="q",
        tile=tile.q,
        heads="q",
    )
    main = Kernel(
        name="backward_keys",
        threads=32 * tile.warps,
        shared_bytes=tile.shared_bytes(*sizes),
        rows="kv",
        tile=tile.kv,
        heads="kv",
    )
    headers = ["kernels/backward_rows_sm80.cuh", "kernels/backward_keys_sm80.cuh"]
    functions = ["backward_preprocess_sm80", "backward_keys_sm80"]
    config: list[tuple[str, int | bool]] = [
        ("kQTile", tile.q),
        ("kKvTile", tile.kv),
        ("kNumWarps", tile.warps),
        ("kNumStages", tile.stages),
        ("kSharesScoreTile", tile.shares),
    ]
    row_shared_bytes = 4 * _ROW_THREADS // 32
    if queries is None:
        functions.append("backward_finish_sm80")
        finish = Kernel(
            name="backward_finish",
            threads=_ROW_THREADS,
            shared_bytes=row_shared_bytes,
            rows="q",
            tile=tile.q,
            heads="q",
        )
        launch = Launch(
            kernels=(preprocess, main, finish),
            q_tile=tile.q,
            accumulator_head_dim=key.head_dim,
        )
    else:
        headers.append("kernels/backward_queries_sm80.cuh")
        functions += ["backward_queries_sm80", "backward_sum_dscale_sm80"]
        config += [
            ("kQueriesQTile", queries.q),
            ("kQueriesKvTile", queries.kv),
            ("kQueriesNumStages", queries.stages),
        ]
        dquery = Kernel(
            name="backward_queries",
            threads=2 * queries.q,
            shared_bytes=queries.shared_bytes(*sizes),
            rows="q",
            tile=queries.q,
            heads="q",
        )
        # One block adds up dscale of all blocks of the kernel before.
        sum_dscale = Kernel(
            name="backward_sum_dscale",
            threads=_ROW_THREADS,
            shared_bytes=row_shared_bytes,
            per_outer=False,
        )
        launch = Launch(
            kernels=(preprocess, main, dquery, sum_dscale),
            q_tile=max(tile.q, queries.q),
            scratch_bytes=4 * key.num_heads * -(-key.q_seq_len // queries.q),
        )
    return Plan(
        headers=tuple(headers),
        config=tuple(config),
        functions=tuple(functions),
        launch=launch,
    )


def keys_tiles(key: TuneKey) -> Iterator[KeysTile]:
    """Tiles of the main kernel for a key, the best first."""
    wider = max(key.head_dim, key.value_head_dim)
    for largest, tiles in _KEYS_TILES[_itemsize(key)]:
        if wider <= largest:
            yield from tiles


def _itemsize(key: TuneKey) -> int:
    return 4 if key.dtype == "float32" else 2


def _first_that_fits(key: TuneKey, tiles: Iterable[_Tile]) -> _Tile:
    sizes = key.head_dim, key.value_head_dim

    def fits(tile: _Tile) -> bool:
        return (
            tile.shared_bytes(*sizes, _itemsize(key)) <= key.max_shared_bytes
            and tile.accumulators(*sizes) <= _MAX_ACCUMULATORS
        )

    return first_that_fits(key, tiles, fits)
