"""`ScoreMask` and `TileWalk` of the device headers, run on the CPU with a warp of 32
lanes, against the dense mask."""

import ctypes
import dataclasses

import jax.numpy as jnp
import numpy as np
import on_cpu
import pytest

from fkl_jax import SlidingWindow
from fkl_jax._compose import trace_masks
from fkl_jax._functors import functor
from fkl_jax._mask_mods import as_mask_mod

Q_TILE, KV_TILE = 16, 8
LEFT, RIGHT = 21, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """What masks a call has. `exact`: a tile without live elements is always seen to
    be dead, because no two sources meet."""

    name: str
    segments: bool = False
    lengths: bool = False
    blocks: bool = False
    program: str = "fkl::NoMaskMod"
    exact: bool = False

    def __str__(self) -> str:
        return self.name


CASES = [
    Sources(name="bounds", exact=True),
    Sources(name="lengths", lengths=True, exact=True),
    Sources(name="blocks", blocks=True, exact=True),
    Sources(name="segments", segments=True),
    Sources(name="window", program="window::MaskMod", exact=True),
    Sources(name="causal", program="causal::MaskMod", exact=True),
    Sources(name="causal_lengths", program="causal::MaskMod", lengths=True),
    Sources(name="segments_blocks_lengths", segments=True, blocks=True, lengths=True),
    Sources(
        name="everything",
        segments=True,
        blocks=True,
        lengths=True,
        program="window::MaskMod",
    ),
]


ARRAYS = ("q_ids", "kv_ids", "q_len", "kv_len", "q_off", "kv_off", "blocks")
ARRAYS += ("left", "right")


class Inputs(ctypes.Structure):
    _fields_ = [
        *(
            (n, ctypes.c_int)
            for n in ("q_seq_len", "kv_seq_len", "block_q", "block_kv")
        ),
        *((n, ctypes.c_void_p) for n in ARRAYS),
    ]


PREFIX = """
#include "attention/interval.cuh"
#include "attention/score_mask.cuh"
struct Inputs {
  int q_seq_len, kv_seq_len, block_q, block_kv;
  void *q_ids, *kv_ids, *q_len, *kv_len, *q_off, *kv_off, *blocks, *left, *right;
};
fkl::CommonParams Params(const Inputs& in) {
  fkl::CommonParams p{};
  p.q_seq_len = in.q_seq_len, p.kv_seq_len = in.kv_seq_len;
  p.block_q = in.block_q, p.block_kv = in.block_kv;
  p.num_kv_blocks = (in.kv_seq_len + in.block_kv - 1) / in.block_kv;
  p.q_segment_ids.data = in.q_ids, p.kv_segment_ids.data = in.kv_ids;
  p.q_seq_lengths.data = in.q_len, p.kv_seq_lengths.data = in.kv_len;
  p.q_offset.data = in.q_off, p.kv_offset.data = in.kv_off;
  p.block_mask.data = in.blocks, p.block_mask.row_stride = p.num_kv_blocks;
  p.captures[0].data = in.left, p.captures[1].data = in.right;
  return p;
}
// Every lane must find the same tiles.
template <class Mask, bool kTilesAreKeys>
int Walk(const Inputs& in, int fixed, int begin, int end, bool descends, int* tiles,
         int* states) {
  constexpr int kFixed = kTilesAreKeys ? %(q)d : %(kv)d;
  std::vector<int> found[32];
  on_cpu::RunWarp([&] {
    Mask mask;
    const auto params = Params(in);
    mask.bind(params, fkl::outer_index(params, 0), 0);
    fkl::TileWalk<Mask, %(q)d, %(kv)d, kTilesAreKeys> walk(
        mask, fixed * kFixed, fixed * kFixed + kFixed - 1, begin, end, descends);
    int tile, state;
    auto& mine = found[threadIdx.x];
    while (walk.next(mask, &tile, &state)) mine.insert(mine.end(), {tile, state});
  });
  for (const auto& lane : found) {
    if (lane != found[0]) return -1;
  }
  const int count = static_cast<int>(found[0].size()) / 2;
  for (int i = 0; i < count; ++i) {
    tiles[i] = found[0][2 * i], states[i] = found[0][2 * i + 1];
  }
  return count;
}
// `live` and `classify` of every element, beyond the arrays too.
template <class Mask>
void Elements(const Inputs& in, int rows, int columns, unsigned char* live,
              int* states) {
  Mask mask;
  const auto params = Params(in);
  mask.bind(params, fkl::outer_index(params, 0), 0);
  for (int q = 0; q < rows; ++q) {
    const auto row = mask.bind_row(q);
    for (int kv = 0; kv < columns; ++kv) {
      live[q * columns + kv] = mask.live(row, q, kv);
      states[q * columns + kv] = mask.classify(q, q, kv, kv);
    }
  }
}
""" % {"q": Q_TILE, "kv": KV_TILE}  # noqa: UP031 - braces are C++'s here

CASE = """
struct {name}_Config {{
  static constexpr bool kHasSegmentIds = {segments}, kHasQLengths = {lengths},
                        kHasKvLengths = {lengths}, kHasBlockMask = {blocks};
}};
using {name}_Mask = fkl::ScoreMask<{name}_Config, {program}>;
extern "C" int {name}_walk(const Inputs* in, int keys, int fixed, int begin, int end,
                           bool descends, int* tiles, int* states) {{
  return keys ? Walk<{name}_Mask, true>(*in, fixed, begin, end, descends, tiles, states)
              : Walk<{name}_Mask, false>(*in, fixed, begin, end, descends, tiles,
                                         states);
}}
extern "C" void {name}_elements(const Inputs* in, int rows, int columns,
                                unsigned char* live, int* states) {{
  Elements<{name}_Mask>(*in, rows, columns, live, states);
}}
"""


def _mask_functor(name: str, mod) -> str:
    program = trace_masks([as_mask_mod(mod)])[0].program
    lines = "\n".join(functor("MaskMod", program, ()))
    return f"namespace {name} {{\n{lines}\n}}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    text = PREFIX
    text += _mask_functor("causal", lambda b, h, q, kv: kv <= q)
    text += _mask_functor("window", SlidingWindow(jnp.int32(1), jnp.int32(1)))
    for case in CASES:
        values = {k: str(v).lower() for k, v in dataclasses.asdict(case).items()}
        text += CASE.format(**{**values, "program": case.program})
    return on_cpu.compile_text(text, tmp_path_factory.mktemp("score_mask"))


def _problem(case: Sources, seed: int):
    """Arrays, and the dense mask that they mean."""
    rng = np.random.default_rng(seed)
    t, s = ((37, 611), (300, 300), (1, 64), (129, 8), (64, 0), (16, 2))[seed % 6]
    block_q, block_kv = ((16, 8), (5, 3), (64, 128), (1, 1), (48, 16))[seed % 5]
    blocks = np.zeros((-(-t // block_q), -(-s // block_kv)), np.uint8)
    blocks[rng.random(blocks.shape) < (0.5, 0.1)[seed % 2]] = 255
    low, high = ((-1, 4), (-(2**31), 2**31), (7, 8))[seed % 3]
    ids = [rng.integers(low, high, n).astype(np.int32) for n in (t, s)]
    if seed % 2:
        ids = [np.sort(x) for x in ids]
    lengths = [np.array(rng.integers(-3, n + 9), np.int32) for n in (t, s)]
    offsets = [np.array(rng.integers(-60, 60), np.int32) for _ in range(2)]
    if seed % 7 == 6:
        offsets[0] += 2**31 - 80  # indices of mods wrap
    arrays = {
        "q_ids": ids[0],
        "kv_ids": ids[1],
        "q_len": lengths[0],
        "kv_len": lengths[1],
        "q_off": offsets[0],
        "kv_off": offsets[1],
        "blocks": blocks,
        "left": np.array(LEFT, np.int32),
        "right": np.array(RIGHT, np.int32),
    }
    q, kv = np.indices((t, s))
    live = np.ones((t, s), bool)
    if case.segments:
        live &= (ids[0][:, None] == ids[1][None]) & (ids[0][:, None] >= 0)
    if case.lengths:
        live &= (q < lengths[0]) & (kv < lengths[1])
    if case.blocks:
        live &= blocks[q // block_q, kv // block_kv] != 0
    a = (q.astype(np.int64) + offsets[0]).astype(np.int32)
    b = (kv.astype(np.int64) + offsets[1]).astype(np.int32)
    with np.errstate(over="ignore"):
        if "window" in case.program:
            live &= (a - np.int32(LEFT) <= b) & (b <= a + np.int32(RIGHT))
        if "causal" in case.program:
            live &= b <= a
    inputs = Inputs(
        q_seq_len=t,
        kv_seq_len=s,
        block_q=block_q,
        block_kv=block_kv,
        **{name: x.ctypes.data for name, x in arrays.items()},
    )
    return inputs, arrays, live


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_elements_and_tiles_are_those_of_the_dense_mask(library, case, seed):
    inputs, _keep, live = _problem(case, seed)
    t, s = live.shape
    padded = np.zeros((t + 7, s + 7), bool)
    padded[:t, :s] = live
    found = np.zeros(padded.shape, np.uint8)
    states = np.zeros(padded.shape, np.int32)
    out = on_cpu.pointer(found), on_cpu.pointer(states)
    getattr(library, f"{case.name}_elements")(ctypes.byref(inputs), *padded.shape, *out)
    np.testing.assert_array_equal(found.astype(bool), padded)
    np.testing.assert_array_equal(states, 2 * padded)

    is_exact = case.exact and seed % 7 != 6
    for keys in (True, False):
        dense = live if keys else live.T
        fixed_tile, tile = (Q_TILE, KV_TILE) if keys else (KV_TILE, Q_TILE)
        num_fixed, num_tiles = (
            -(-dense.shape[0] // fixed_tile),
            -(-dense.shape[1] // tile),
        )
        for fixed in range(num_fixed):
            begin, end = (0, num_tiles) if fixed % 2 else (1, num_tiles + 40)
            got = _walk(library, case, inputs, keys, fixed, begin, end, False)
            assert list(got) == sorted(got)
            back = _walk(library, case, inputs, keys, fixed, begin, end, True)
            assert list(back.items()) == list(got.items())[::-1]
            for k in range(begin, min(end, num_tiles)):
                rows = slice(fixed * fixed_tile, (fixed + 1) * fixed_tile)
                part = dense[rows, k * tile : (k + 1) * tile]
                is_whole = part.shape == (fixed_tile, tile)
                assert k in got or not part.any()
                assert got.get(k) != 2 or (part.all() and is_whole)
                if is_exact:
                    assert (k in got) == part.any()
                    assert got.get(k) != 1 or not (part.all() and is_whole)


def _walk(
    library, case, inputs, keys, fixed, begin, end, descends=False
) -> dict[int, int]:
    """The tiles that are not dead, and their states."""
    tiles, states = np.zeros(4096, np.int32), np.zeros(4096, np.int32)
    out = on_cpu.pointer(tiles), on_cpu.pointer(states)
    walk = getattr(library, f"{case.name}_walk")
    count = walk(ctypes.byref(inputs), int(keys), fixed, begin, end, descends, *out)
    assert count >= 0, "the lanes of a warp disagree"
    assert len(set(tiles[:count])) == count
    return dict(zip(tiles[:count].tolist(), states[:count].tolist(), strict=True))


def test_a_tile_of_one_segment_is_live_and_one_of_others_is_dead(library):
    case = CASES[3]
    ids = np.repeat(np.array([5, 2, 9], np.int32), 64)  # constant, in no order
    inputs, _keep, _ = _problem(case, 0)
    inputs.q_seq_len = inputs.kv_seq_len = ids.size
    inputs.q_ids = inputs.kv_ids = ids.ctypes.data
    for fixed in range(ids.size // Q_TILE):
        first = fixed * Q_TILE // 64 * 64 // KV_TILE
        expected = {k: 2 for k in range(first, first + 64 // KV_TILE)}
        assert _walk(library, case, inputs, True, fixed, 0, 4096) == expected
