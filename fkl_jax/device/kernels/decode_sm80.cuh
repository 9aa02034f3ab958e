// Forward pass for few query rows (decoding): bound by reading K and V once, so everything serves bytes in flight.
//
// A block owns up to kQTile rows and, with kIsSplit, one part of the keys. If nothing but the query depends on the head
// (kMergedQuery) the rows are those of all query heads of a kv head, row = q * group + head in group, so K and V are
// read once for the group. A key tile is kNumWarps slices, one per warp; a warp copies its own slice of the next
// kNumStages - 1 live tiles ahead and waits for no other warp until the end, where the warps' partial softmaxes are
// merged in shared memory.
//
// Shared memory: Q; per warp kNumStages slices of K and V; at the end the same memory holds the warps' partial results.
#ifndef FKL_DEVICE_KERNELS_DECODE_SM80_CUH_
#define FKL_DEVICE_KERNELS_DECODE_SM80_CUH_

#include "kernels/forward_sm80.cuh"

namespace fkl {

template <class Config>
struct DecodeShape {
  using Element = typename Config::Element;
  static constexpr int kQTile = Config::kQTile, kKvTile = Config::kKvTile;
  static constexpr int kNumWarps = Config::kNumWarps, kThreads = kNumWarps * kWarpSize;
  static constexpr int kNumStages = Config::kNumStages;
  static constexpr int kMTiles = kQTile / 16, kSlice = kKvTile / kNumWarps;
  static_assert(kQTile % 16 == 0 && kKvTile % kNumWarps == 0, "whole fragments");
  static_assert(kSlice % 16 == 0 && kSlice <= kWarpSize, "pairs of fragments; cleared rows are bits");
  static_assert(kNumStages >= 2, "");

  using QueryTile = TileLayout<Element, kQTile, Config::kHeadDim>;
  using KeyTile = TileLayout<Element, kSlice, Config::kHeadDim>;  // of one warp
  using ValueTile = TileLayout<Element, kSlice, Config::kValueHeadDim>;

  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
  static constexpr int kLoadBytes = QueryTile::kBytes + kNumWarps * kNumStages * kStageBytes;
  // Partial results: per warp and row the values, then maximum and sum. Rows are padded against bank conflicts.
  static constexpr int kRowFloats = Config::kValueHeadDim + 8;
  static constexpr int kStatistics = kNumWarps * kQTile * kRowFloats * 4;
  static constexpr int kMergeBytes = kStatistics + kNumWarps * kQTile * 8;
  static constexpr int kSharedBytes = max_int(kLoadBytes, kMergeBytes);
};

template <class Config>
constexpr int decode_sm80_shared_bytes = DecodeShape<Config>::kSharedBytes;

// Rows of the tile, as numbered above.
template <class Config>
struct DecodeRows {
  int first;      // of the tile
  int end;        // rows that exist
  int num_heads;  // that share a tile
  int head;       // the first of them

  FKL_DEVICE int q(int row) const { return Config::kMergedQuery ? (first + row) / num_heads : first + row; }
  FKL_DEVICE int head_of(int row) const { return Config::kMergedQuery ? head + (first + row) % num_heads : head; }
};

// Rows of Q are at no regular distance, and there are few: one chunk at a time, through registers.
template <class Config, class QueryTile>
FKL_DEVICE void load_query_rows(const TensorParam& param, const OuterIndex& outer, const DecodeRows<Config>& rows,
                                int q_end, int head_dim, uint32_t tile, int thread, int num_threads) {
  using Element = typename Config::Element;
  constexpr int kElements = QueryTile::kChunkElements;
  for (int index = thread; index < QueryTile::kRows * QueryTile::kChunks; index += num_threads) {
    const int row = index / QueryTile::kChunks, chunk = index % QueryTile::kChunks;
    Chunk16 value{{0, 0, 0, 0}};
    const int column = chunk * kElements;
    if (rows.first + row < rows.end && rows.q(row) < q_end && column < head_dim) {
      const Element* source =
          at_outer<const Element>(param, outer, rows.head_of(row)) + rows.q(row) * param.row_stride + column;
      if constexpr (Config::kAligned) {
        value = load_global_16(source);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (column + i >= head_dim) break;
          if constexpr (sizeof(Element) == 4) {
            value.word[i] = load_global_u32(source + i);
          } else {
            value.word[i / 2] |= static_cast<uint32_t>(load_global_u16(source + i)) << (16 * (i % 2));
          }
        }
      }
    }
    store_shared_16(tile + static_cast<uint32_t>(QueryTile::chunk_offset(row, chunk)), value);
  }
}

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void decode_sm80(const ForwardParams& params) {
  using Shape = DecodeShape<Config>;
  using Element = typename Config::Element;
  using MmaType = Mma<Element, Config::kFullPrecision>;
  using Scores = ForwardScores<Config, ScoreMod, MaskMod>;
  using Mask = typename Scores::Mask;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile, kSlice = Shape::kSlice;
  constexpr int kMTiles = Shape::kMTiles, kNumStages = Shape::kNumStages;
  constexpr bool kGuardsValues = !Mask::kIsBoundsOnly;
  using Poisoned = PoisonedValues<ValueTile, kWarpSize>;

  alignas(kSharedAlignment) extern __shared__ unsigned char decode_shared[];
  const uint32_t shared = shared_address(decode_shared);
  const CommonParams& common = params.common;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_index(), lane = lane_index();
  const int group = common.num_q_heads / common.num_kv_heads;

  // Blocks: (outer, head, split, row tile), the last fastest.
  DecodeRows<Config> rows;
  rows.num_heads = Config::kMergedQuery ? group : 1;
  rows.end = common.q_seq_len * rows.num_heads;
  const int num_row_tiles = ceil_div(rows.end, kQTile);
  const int num_splits = Config::kIsSplit ? params.num_splits : 1;
  const int num_heads = Config::kMergedQuery ? common.num_kv_heads : common.num_q_heads;
  int rest = static_cast<int>(blockIdx.x);
  rows.first = rest % num_row_tiles * kQTile;
  rest /= num_row_tiles;
  const int split = rest % num_splits;
  rest /= num_splits;
  rows.head = rest % num_heads * rows.num_heads;
  const long long outer_number = rest / num_heads;
  const OuterIndex outer = outer_index(common, outer_number);
  const int kv_head = rows.head / group;

  Scores scores;
  scores.bind(common, outer, rows.head);
  const int q_end = scores.mask.q_end(), kv_end = scores.mask.kv_end();

  // The keys that exist are split evenly, however long the array is.
  const int num_tiles = ceil_div(kv_end, kKvTile);
  const int tiles_per_split = ceil_div(num_tiles, num_splits);
  const int last_row = min_int(kQTile, rows.end - rows.first) - 1;
  TileWalk<Mask, kQTile, kKvTile, true> walk(scores.mask, rows.q(0), min_int(rows.q(last_row), q_end - 1),
                                             split * tiles_per_split,
                                             min_int((split + 1) * tiles_per_split, num_tiles));

  const Element* value = at_outer<const Element>(common.value, outer, kv_head);
  const TileCopy<KeyTile, Config::kAligned, kWarpSize> key_copy(at_outer<const Element>(common.key, outer, kv_head),
                                                                common.key.row_stride, common.head_dim, lane);
  const TileCopy<ValueTile, Config::kAligned, kWarpSize> value_copy(value, common.value.row_stride,
                                                                    common.value_head_dim, lane);
  const uint32_t slices = shared + QueryTile::kBytes + static_cast<uint32_t>(warp * kNumStages * Shape::kStageBytes);
  const auto copy_slice = [&](int tile, int stage) {
    const uint32_t slice = slices + static_cast<uint32_t>(stage * Shape::kStageBytes);
    const int first = tile * kKvTile + warp * kSlice;
    key_copy.copy(slice, first, kv_end);
    value_copy.copy(slice + KeyTile::kBytes, first, kv_end);
  };

  // The next kNumStages - 1 live tiles; -1: none.
  int tiles[kNumStages - 1], states[kNumStages - 1];
#pragma unroll
  for (int i = 0; i < kNumStages - 1; ++i) {
    if (!walk.next(scores.mask, &tiles[i], &states[i])) tiles[i] = -1;
    if (tiles[i] >= 0) copy_slice(tiles[i], i);
    cp_async_commit();
  }
  load_query_rows<Config, QueryTile>(common.query, outer, rows, q_end, common.head_dim, shared, thread,
                                     Shape::kThreads);
  __syncthreads();

  OnlineSoftmax<kMTiles> softmax;
  softmax.clear();
  float acc_o[kMTiles][Config::kValueHeadDim / 8][4];
  clear_accumulators(acc_o);
  QueryFragments<MmaType, QueryTile, kMTiles, Config::kQueryInRegisters> query;
  query.bind(shared, 0, lane);
  query.load();
  const auto key_base = MmaType::template b_base<KeyTile>(slices, lane);
  const auto value_base = MmaType::template b_trans_base<ValueTile>(slices + KeyTile::kBytes, lane);
  const auto row_of = [&](int m, int half) { return scores.clip_row(rows.q(16 * m + 8 * half + lane / 4)); };

  int stage = 0;
  while (tiles[0] >= 0) {
    const int kv_first = tiles[0] * kKvTile + warp * kSlice;
    const bool is_mixed = states[0] == kTileMixed;
    cp_async_wait<kNumStages - 2>();
    __syncwarp();  // all lanes' copies are here, and all lanes are done with the stage before
    const int free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
#pragma unroll
    for (int i = 0; i < kNumStages - 2; ++i) {
      tiles[i] = tiles[i + 1];
      states[i] = states[i + 1];
    }
    int& last_tile = tiles[kNumStages - 2];
    if (!walk.next(scores.mask, &last_tile, &states[kNumStages - 2])) last_tile = -1;
    if (last_tile >= 0) copy_slice(last_tile, free_stage);
    cp_async_commit();

    const uint32_t offset = static_cast<uint32_t>(stage * Shape::kStageBytes);
    float acc_s[kMTiles][kSlice / 8][4];
    multiply_query_key<MmaType, QueryTile, KeyTile>(acc_s, query, MmaType::moved(key_base, offset));
    const int kv_lane = kv_first + 2 * (lane % 4);
    if (is_mixed) {
      scores.template apply<true>(acc_s, row_of, kv_lane);
    } else {
      scores.template apply<false>(acc_s, row_of, kv_lane);
    }
    softmax.update(acc_s, acc_o, scores.to_log2);
    typename MmaType::FragmentA probs[kMTiles][kSlice / MmaType::kK];
    probs_to_fragments<MmaType>(probs, acc_s);
    if constexpr (kGuardsValues) {
      const uint32_t value_tile = slices + offset + KeyTile::kBytes;
      if (is_mixed && __any_sync(0xffffffffu, Poisoned::find(value_tile, lane))) {
        uint32_t cleared = Poisoned::clear(value_tile, 0, 1, lane);
        __syncwarp();
        for (; cleared != 0; cleared &= cleared - 1) {
          const int key = __ffs(static_cast<int>(cleared)) - 1;
          Poisoned::template add<MmaType>(acc_o, probs, key, value + (kv_first + key) * common.value.row_stride,
                                          common.value_head_dim, lane);
        }
      }
    }
    multiply_probs_value<MmaType, ValueTile>(acc_o, probs, MmaType::moved(value_base, offset));
    stage = stage == kNumStages - 1 ? 0 : stage + 1;
  }

  // Merge the warps. Their slices are no longer needed once all are here.
  softmax.finish();
  cp_async_wait<0>();
  __syncthreads();
  const auto statistics = [&](int of_warp, int row) {
    return shared + static_cast<uint32_t>(Shape::kStatistics + (of_warp * kQTile + row) * 8);
  };
  const auto partial = [&](int of_warp, int row, int column) {
    return shared + static_cast<uint32_t>(((of_warp * kQTile + row) * Shape::kRowFloats + column) * 4);
  };
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0) {
        store_shared_8(statistics(warp, row), __float_as_uint(softmax.row_max_log2[m][half]),
                       __float_as_uint(softmax.row_sum[m][half]));
      }
#pragma unroll
      for (int tile = 0; tile < Config::kValueHeadDim / 8; ++tile) {
        store_shared_8(partial(warp, row, 8 * tile + accumulator_column(lane, 0)),
                       __float_as_uint(acc_o[m][tile][2 * half]), __float_as_uint(acc_o[m][tile][2 * half + 1]));
      }
    }
  }
  __syncthreads();

  const long long num_split_rows = common.num_outer * common.num_q_heads * common.q_seq_len;
  for (int row = warp; row < kQTile; row += Shape::kNumWarps) {
    if (rows.first + row >= rows.end) break;
    const int q = rows.q(row), head = rows.head_of(row);
    float row_max = -infinity(), row_sum = 0.0f, weight[Shape::kNumWarps];
#pragma unroll
    for (int w = 0; w < Shape::kNumWarps; ++w) row_max = fmaxf(row_max, load_shared_f32(statistics(w, row)));
#pragma unroll
    for (int w = 0; w < Shape::kNumWarps; ++w) {
      const float warp_max = load_shared_f32(statistics(w, row));
      weight[w] = warp_max == row_max ? 1.0f : exp2_approx(warp_max - row_max);
      // A NaN sum stays: 0 * NaN.
      row_sum += weight[w] * load_shared_f32(statistics(w, row) + 4);
    }
    float sink = -infinity();
    if constexpr (Config::kHasSinks && !Config::kIsSplit)
      sink = __ldg(at_outer<const float>(common.sinks, outer) + head);
    RowResult result = RowResult::of(row_max, row_sum, sink);
    if (q >= q_end) {
      result.is_empty = true;
      result.lse = -infinity();
    }
    const long long out_row = (outer_number * common.num_q_heads + head) * common.q_seq_len + q;
    if (lane == 0) {
      float* lse = Config::kIsSplit ? params.partial_lse + split * num_split_rows : params.lse;
      lse[out_row] = result.lse;
    }
    for (int column = 2 * lane; column < common.value_head_dim; column += 2 * kWarpSize) {
      float x = 0.0f, y = 0.0f;
#pragma unroll
      for (int w = 0; w < Shape::kNumWarps; ++w) {
        const Chunk8 pair = load_shared_8(partial(w, row, column));
        x = fmaf(weight[w], __uint_as_float(pair.word[0]), x);
        y = fmaf(weight[w], __uint_as_float(pair.word[1]), y);
      }
      x = result.is_empty ? 0.0f : x * result.factor;
      y = result.is_empty ? 0.0f : y * result.factor;
      if constexpr (Config::kIsSplit) {
        float* out = params.partial_out + (split * num_split_rows + out_row) * common.value_head_dim;
        store_pair<false>(out, column, common.value_head_dim, x, y);
      } else {
        Element* out = at_outer<Element>(params.out, outer, head) + q * params.out.row_stride;
        store_pair<Config::kAligned>(out, column, common.value_head_dim, x, y);
      }
    }
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_DECODE_SM80_CUH_
