// The small kernels around the main one: the statistics of the query rows before it, dQ in its own type and the sums of
// dscale after it.
#ifndef FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM80_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM80_CUH_

#include "kernels/backward_scores.cuh"

namespace fkl {

// Which rows a block of a kernel over (query tile, query head, outer element) owns.
struct RowBlock {
  int tile, head;
  long long outer;

  static FKL_DEVICE RowBlock of(const CommonParams& params, unsigned block, int q_tile) {
    const unsigned num_tiles = static_cast<unsigned>(ceil_div(params.q_seq_len, q_tile));
    const unsigned head = block / num_tiles;
    const unsigned num_heads = static_cast<unsigned>(params.num_q_heads);
    return {static_cast<int>(block % num_tiles), static_cast<int>(head % num_heads),
            static_cast<long long>(head / num_heads)};
  }
};

// One chunk of a row of global memory; what is beyond the row is 0.
template <bool kAligned, class Element>
FKL_DEVICE Chunk16 load_row_chunk(const Element* row, int chunk, int num_columns) {
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  Chunk16 value{{0, 0, 0, 0}};
  const int first = chunk * kElements;
  if (first >= num_columns) return value;
  if constexpr (kAligned) {
    value = load_global_16(row + first);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (first + i >= num_columns) break;
      if constexpr (sizeof(Element) == 4) {
        value.word[i] = load_global_u32(row + first + i);
      } else {
        value.word[i / 2] |= static_cast<uint32_t>(load_global_u16(row + first + i)) << (16 * (i % 2));
      }
    }
  }
  return value;
}

template <class Element>
FKL_DEVICE float chunk_dot(const Chunk16& a, const Chunk16& b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4) {
      sum = fmaf(__uint_as_float(a.word[i]), __uint_as_float(b.word[i]), sum);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Element x{static_cast<uint16_t>(a.word[i] >> (16 * half))};
        const Element y{static_cast<uint16_t>(b.word[i] >> (16 * half))};
        sum = fmaf(to_float(x), to_float(y), sum);
      }
    }
  }
  return sum;
}

constexpr int kBackwardRowThreads = 128;

// lse_log2 and delta of kQTile rows; eight lanes share a row. `store(row, lse_log2, delta, is_marked)`.
template <class Config, class Store>
FKL_DEVICE void preprocess_rows(const BackwardParams& params, Store store) {
  using Element = typename Config::Element;
  constexpr int kLanesPerRow = 8, kRowsAtOnce = kBackwardRowThreads / kLanesPerRow;
  constexpr int kElements = kChunkBytes / static_cast<int>(sizeof(Element));
  const CommonParams& common = params.common;
  const RowBlock block = RowBlock::of(common, blockIdx.x, Config::kQTile);
  const OuterIndex outer = outer_index(common, block.outer);
  const Element* query = at_outer<const Element>(common.query, outer, block.head);
  const Element* out = at_outer<const Element>(params.out, outer, block.head);
  const Element* dout = at_outer<const Element>(params.dout, outer, block.head);
  const long long head_rows = static_cast<long long>(block.head) * common.q_seq_len;
  const float* lse = at_outer<const float>(params.lse, outer) + head_rows;
  const float* dlse = at_outer<const float>(params.dlse, outer);
  const long long row0 = padded_row(params, block.outer, block.head);
  const int lane = static_cast<int>(threadIdx.x) % kLanesPerRow;

#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) / kLanesPerRow; r < Config::kQTile; r += kRowsAtOnce) {
    const int q = block.tile * Config::kQTile + r;
    float sum = 0.0f, row_lse = -infinity();
    bool is_marked = false;
    if (q < common.q_seq_len) {
      row_lse = lse[q];
      // With sinks a row without a live key has the sink as its LSE: nothing here tells it from the others.
      const bool may_be_dead = Config::kHasSinks || row_lse == -infinity();
      for (int chunk = lane; chunk < Config::kValueHeadDim / kElements; chunk += kLanesPerRow) {
        const Chunk16 x =
            load_row_chunk<Config::kAligned>(dout + q * params.dout.row_stride, chunk, common.value_head_dim);
        const Chunk16 y =
            load_row_chunk<Config::kAligned>(out + q * params.out.row_stride, chunk, common.value_head_dim);
        sum += chunk_dot<Element>(x, y);
        if (may_be_dead) is_marked |= has_non_finite<Element>(x);
      }
      if (may_be_dead) {
        for (int chunk = lane; chunk < Config::kHeadDim / kElements; chunk += kLanesPerRow) {
          is_marked |= has_non_finite<Element>(
              load_row_chunk<Config::kAligned>(query + q * common.query.row_stride, chunk, common.head_dim));
        }
      }
    }
#pragma unroll
    for (int bit = 1; bit < kLanesPerRow; bit *= 2) sum += shuffle_xor(sum, bit);
    const unsigned row_lanes = 0xffu << (threadIdx.x % kWarpSize / kLanesPerRow * kLanesPerRow);
    is_marked = (__ballot_sync(0xffffffffu, is_marked) & row_lanes) != 0;
    float lse_log2, delta;
    if (row_lse == -infinity()) {
      lse_log2 = infinity();
      delta = is_marked ? 1.0f : 0.0f;
    } else {
      lse_log2 = is_marked ? not_a_number() : row_lse * kLog2e;
      delta = sum - (dlse == nullptr ? 0.0f : dlse[head_rows + q]);
    }
    if (lane == 0) store(row0 + q, lse_log2, delta, is_marked);
  }
}

template <class Config>
constexpr int backward_preprocess_sm80_shared_bytes = 0;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_preprocess_sm80(const BackwardParams& params) {
  preprocess_rows<Config>(params, [&](long long row, float lse_log2, float delta, bool) {
    params.lse_log2[row] = lse_log2;
    params.delta[row] = delta;
  });
}

// The sum over a block, in thread 0; always in the same order.
template <int kWarps>
FKL_DEVICE float block_sum(float value, float* shared) {
  value = sum_over_lanes<31>(value);
  if (lane_index() == 0) shared[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

// A row of 16 columns of a block (DqueryBlock) times `factor`, by the four lanes that have it; the whole warp comes.
template <bool kAligned, class Element>
FKL_DEVICE void store_block_row(Element* row, int first_column, int num_columns, int lane, const float (&value)[4],
                                float factor) {
  const int t = lane % 4;
  if constexpr (kAligned && sizeof(Element) == 2) {
    // Neighbouring columns are brought together: the row is one sector of memory, written by one instruction.
    const uint32_t low = Conversion<Element>::pack(value[0] * factor, value[1] * factor);
    const uint32_t high = Conversion<Element>::pack(value[2] * factor, value[3] * factor);
    Chunk8 columns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int source = (lane & ~3) + (2 * t + i) % 4;
      const uint32_t left = __shfl_sync(0xffffffffu, low, source), right = __shfl_sync(0xffffffffu, high, source);
      columns.word[i] = t < 2 ? left : right;
    }
    if (first_column + 4 * t < num_columns) *reinterpret_cast<Chunk8*>(row + first_column + 4 * t) = columns;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      store_pair<kAligned>(row, first_column + 2 * t + 4 * i, num_columns, value[i] * factor, value[i + 1] * factor);
  }
}

// How the tiles of the accumulator are stored: columns of a row, and the number of block (m, n).
template <class Config>
struct DqueryOrder {
  static constexpr int kColumns = Config::kHeadDim;
  static FKL_DEVICE int index(int m, int n) { return m * (kColumns / 16) + n; }
};

// dQ from the float accumulator, times the scale, and dscale = sum of q . (dS K), which is right for a scale of 0 too.
template <class Config, class Order>
FKL_DEVICE void finish_rows(const BackwardParams& params) {
  using Element = typename Config::Element;
  constexpr int kBlocksN = Config::kHeadDim / 16, kBlocks = Config::kQTile / 16 * kBlocksN;
  constexpr int kWarps = kBackwardRowThreads / kWarpSize;
  if (params.dquery.data == nullptr && !Config::kHasDscale) return;
  const CommonParams& common = params.common;
  const RowBlock block = RowBlock::of(common, blockIdx.x, Config::kQTile);
  const OuterIndex outer = outer_index(common, block.outer);
  const int q_first = block.tile * Config::kQTile;
  const float* accumulator =
      params.dquery_accumulator + (padded_row(params, block.outer, block.head) + q_first) * Order::kColumns;
  Element* dquery = at_outer<Element>(params.dquery, outer, block.head);
  const float scale = *at_outer<const float>(common.scale, outer);
  const int lane = lane_index();
  float dscale = 0.0f;

#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x) / kWarpSize; index < kBlocks; index += kWarps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float value[4];
      DqueryBlock::load(accumulator + Order::index(index / kBlocksN, index % kBlocksN) * DqueryBlock::kFloats, half,
                        lane, value);
      const int q = q_first + index / kBlocksN * 16 + lane / 4 + 8 * half, first_column = index % kBlocksN * 16;
      const bool is_row = q < common.q_seq_len;
      if constexpr (Config::kHasDscale) {
        const Element* query = at_outer<const Element>(common.query, outer, block.head) + q * common.query.row_stride;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = first_column + 2 * (lane % 4) + i % 2 + 8 * (i / 2);
          // Dead rows have a gradient of 0 and may hold anything.
          if (is_row && column < common.head_dim && value[i] != 0.0f)
            dscale = fmaf(to_float(query[column]), value[i], dscale);
        }
      }
      if (dquery != nullptr) {
        store_block_row<Config::kAligned>(dquery + q * params.dquery.row_stride, first_column,
                                          is_row ? common.head_dim : 0, lane, value, scale);
      }
    }
  }
  if constexpr (Config::kHasDscale) {
    extern __shared__ float backward_finish_shared[];
    const float sum = block_sum<kWarps>(dscale, backward_finish_shared);
    if (threadIdx.x == 0) reduce_add_global(at_outer<float>(params.dscale_result, outer), sum);
  }
}

template <class Config>
constexpr int backward_finish_sm80_shared_bytes = 4 * (kBackwardRowThreads / kWarpSize);

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_finish_sm80(const BackwardParams& params) {
  finish_rows<Config, DqueryOrder<Config>>(params);
}

template <class Config>
constexpr int backward_sum_dscale_sm80_shared_bytes = 4 * (kBackwardRowThreads / kWarpSize);

// Deterministic calls: one block adds up what the blocks of backward_queries_sm80 left in `scratch`, in a fixed order.
template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_sum_dscale_sm80(const BackwardParams& params) {
  if constexpr (Config::kHasDscale) {
    extern __shared__ float backward_sum_shared[];
    const CommonParams& common = params.common;
    const int per_outer = common.num_q_heads * ceil_div(common.q_seq_len, Config::kQueriesQTile);
    for (long long o = 0; o < common.num_outer; ++o) {
      const float* partial = static_cast<const float*>(params.scratch) + o * per_outer;
      float sum = 0.0f;
      for (int i = static_cast<int>(threadIdx.x); i < per_outer; i += kBackwardRowThreads) sum += partial[i];
      sum = block_sum<kBackwardRowThreads / kWarpSize>(sum, backward_sum_shared);
      if (threadIdx.x == 0) *at_outer<float>(params.dscale_result, outer_index(common, o)) += sum;
      __syncthreads();
    }
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM80_CUH_
