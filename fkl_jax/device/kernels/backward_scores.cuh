// What the backward kernels share: from a score and dP to P and dS, one element at a time, and the products of tiles.
//
//   score = scale * (q . k) + bias, then the score program;  P = exp(score - lse);  dS = P * (dP - delta), then the
//   program's derivative. dQ = scale * dS K and dK = scale * dS^T Q; the scale is applied when they are stored.
// The softmax is in units of log2: without program and bias an element costs one FFMA and one ex2.
#ifndef FKL_DEVICE_KERNELS_BACKWARD_SCORES_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_SCORES_CUH_

#include "attention/mods.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/score_mask.cuh"
#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/copy.cuh"
#include "tile/layout.cuh"
#include "tile/mma.cuh"

namespace fkl {

FKL_DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// ---- Statistics of a query row, written by backward_preprocess_sm80.
//
// A row that attends to nothing gets lse_log2 = +inf and delta = 0: its P and dS are 0 without a test. A row whose Q or
// dO must not be read because it is not finite is marked: its P may be 0, but 0 * NaN is NaN in dK and dV, so the main
// kernel clears marked rows in shared memory. If the row may be live after all, its P is NaN by lse_log2.
FKL_DEVICE bool is_marked_row(float lse_log2, float delta) {
  return lse_log2 != lse_log2 || (lse_log2 == infinity() && delta != 0.0f);
}

template <class Element>
FKL_DEVICE bool has_non_finite(const Chunk16& chunk) {
  constexpr uint32_t kLow = IsSame<Element, BFloat16>::kValue  ? 0x00007f80u
                            : IsSame<Element, Float16>::kValue ? 0x00007c00u
                                                               : 0u;
  constexpr uint32_t kHigh = sizeof(Element) == 4 ? 0x7f800000u : kLow << 16;
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    found |= (chunk.word[i] & kHigh) == kHigh;
    if (sizeof(Element) == 2) found |= (chunk.word[i] & kLow) == kLow;
  }
  return found;
}

// One warp: does row `row` of the shared tile hold a NaN or infinity?
template <class Tile>
FKL_DEVICE bool row_has_non_finite(uint32_t tile, int row, int lane) {
  bool found = false;
  for (int chunk = lane; chunk < Tile::kChunks; chunk += kWarpSize) {
    found |= has_non_finite<typename Tile::Element>(
        load_shared_16(tile + static_cast<uint32_t>(Tile::chunk_offset(row, chunk))));
  }
  return __any_sync(0xffffffffu, found) != 0;
}

template <class Tile>
FKL_DEVICE void clear_row(uint32_t tile, int row, int lane) {
  for (int chunk = lane; chunk < Tile::kChunks; chunk += kWarpSize) {
    store_shared_16(tile + static_cast<uint32_t>(Tile::chunk_offset(row, chunk)), Chunk16{{0, 0, 0, 0}});
  }
}

// ---- One (outer element, query head).

template <class Config, class ScoreMod, class MaskMod, bool kAddsGradients>
struct BackwardHead {
  using Mask = ScoreMask<Config, MaskMod>;
  using BiasElement = typename Config::BiasElement;
  static constexpr bool kIsPlain = ScoreMod::kIsIdentity && !Config::kHasBias;
  static constexpr bool kAddsDbias = kAddsGradients && Config::kHasDbias;
  static constexpr bool kAddsDcaptures = kAddsGradients && Config::kHasDcaptures;
  // Live tiles may use the cheap form of the program.
  static constexpr bool kHasQueryRun = ScoreMod::kHasQueryRun && !Config::kHasBias && !kAddsDcaptures;

  // What one query row needs.
  struct Row {
    typename Mask::Row mask;
    typename ScoreMod::Row mod;
    const BiasElement* bias;
  };

  FKL_DEVICE void bind(const BackwardParams& params, const OuterIndex& outer, int head) {
    const CommonParams& common = params.common;
    mask.bind(common, outer, head);
    scale = *at_outer<const float>(common.scale, outer);
    scale_log2 = scale * kLog2e;
    if constexpr (!ScoreMod::kIsIdentity) {
      q_offset_ = int_or(common.q_offset, outer, 0);
      kv_offset_ = int_or(common.kv_offset, outer, 0);
      mod_ = ScoreMod::bind(common, outer);
      mod_head_ = mod_.bind_head(global_batch(common, outer), global_head(common, outer, head));
    }
    if constexpr (kAddsDcaptures) {
      capture_grads = CaptureGrads::bind(params, outer);
    } else {
#pragma unroll
      for (int k = 0; k < kMaxCaptures; ++k) capture_grads.data[k] = nullptr;
    }
    head_grads = {};
    if constexpr (Config::kHasBias) {
      bias_ = at_outer<const BiasElement>(common.bias, outer, head);
      bias_row_stride_ = common.bias.row_stride;
      bias_column_stride_ = common.bias_column_stride;
    }
    if constexpr (kAddsDbias) {
      dbias_ = at_outer<float>(params.dbias, outer, head);
      dbias_row_stride_ = params.dbias.row_stride;
      dbias_column_stride_ = params.dbias_column_stride;
    }
  }

  template <bool kIsMixed>
  FKL_DEVICE Row bind_row(int q) const {
    Row row{};
    if constexpr (kIsMixed) row.mask = mask.bind_row(q);
    if constexpr (!ScoreMod::kIsIdentity) row.mod = mod_.bind_row(mod_head_, wrapping_add(q, q_offset_));
    if constexpr (Config::kHasBias) row.bias = bias_ + q * bias_row_stride_;
    return row;
  }

  // From q . k and dP - delta to P and dS. Dead elements are selected away: their score may be NaN, and the bias and
  // the program are not looked at. `is_poisoned`: the key is not finite and was cleared in shared memory.
  template <bool kIsMixed>
  FKL_DEVICE void element(const Row& row, int q, int kv, bool is_poisoned, float lse_log2, float& s, float& dp,
                          typename ScoreMod::RowGrads& row_grads) {
    if constexpr (kIsMixed) {
      if (is_poisoned) s = not_a_number();
    }
    if constexpr (kIsPlain) {
      s = exp2_approx(fmaf(s, scale_log2, -lse_log2));
      dp *= s;
      if constexpr (kIsMixed) {
        const bool is_live = mask.live(row.mask, q, kv);
        s = is_live ? s : 0.0f;
        dp = is_live ? dp : 0.0f;
      }
    } else {
      if (kIsMixed && !mask.live(row.mask, q, kv)) {
        s = dp = 0.0f;
        return;
      }
      float score = s * scale;
      if constexpr (Config::kHasBias) score += load_bias(row.bias + kv * bias_column_stride_);
      const int kv_idx = ScoreMod::kIsIdentity ? kv : wrapping_add(kv, kv_offset_);
      const float modified = mod_.score(mod_head_, row.mod, score, kv_idx);
      s = exp2_approx(fmaf(modified, kLog2e, -lse_log2));
      dp = mod_.derivative(mod_head_, row.mod, score, kv_idx, s * dp, capture_grads, head_grads, row_grads);
    }
  }

  // The gradient of the bias: all lanes come, with the dS of query row `q` at keys `kv` and `kv + 8`; lanes that differ
  // in the bits 28 hold other keys of the row. `sum` collects what is the same for all rows.
  FKL_DEVICE void add_dbias(int q, int kv, float ds0, float ds1, int lane, float (&sum)[2]) const {
    if constexpr (kAddsDbias) {
      if (dbias_ == nullptr) return;
      if (dbias_row_stride_ == 0) {
        sum[0] += ds0;
        sum[1] += ds1;
        return;
      }
      float* row = dbias_ + q * dbias_row_stride_;
      if (dbias_column_stride_ == 0) {
        const float total = sum_over_lanes<28>(ds0 + ds1);
        if (lane < 4 && total != 0.0f) reduce_add_global(row, total);
      } else {  // dead elements, and with them what is outside the array, are exactly 0
        if (ds0 != 0.0f) reduce_add_global(row + kv, ds0);
        if (ds1 != 0.0f) reduce_add_global(row + kv + 8, ds1);
      }
    }
  }
  FKL_DEVICE void flush_dbias(int kv, int lane, float (&sum)[2]) const {
    if constexpr (kAddsDbias) {
      if (dbias_ == nullptr || dbias_row_stride_ != 0) return;
      if (dbias_column_stride_ == 0) {
        const float total = sum_over_lanes<31>(sum[0] + sum[1]);
        if (lane == 0 && total != 0.0f) reduce_add_global(dbias_, total);
        return;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = sum_over_lanes<3>(sum[half]);
        if (lane % 4 == 0 && total != 0.0f) reduce_add_global(dbias_ + kv + 8 * half, total);
      }
    }
  }

  template <int kLaneMask>
  FKL_DEVICE void flush_row(const Row& row, typename ScoreMod::RowGrads& row_grads) const {
    if constexpr (kAddsDcaptures && !ScoreMod::kIsIdentity)
      mod_.template flush_row<kLaneMask>(mod_head_, row.mod, capture_grads, row_grads);
  }
  FKL_DEVICE void flush_head() {
    if constexpr (kAddsDcaptures && !ScoreMod::kIsIdentity) mod_.flush_head(mod_head_, capture_grads, head_grads);
  }

  Mask mask;
  float scale, scale_log2;
  CaptureGrads capture_grads;
  typename ScoreMod::HeadGrads head_grads;

 private:
  static FKL_DEVICE float load_bias(const BiasElement* pointer) {
    if constexpr (sizeof(BiasElement) == 2) {
      return to_float(BiasElement{load_global_u16(pointer)});
    } else {
      return __ldg(pointer);
    }
  }

  ScoreMod mod_;
  typename ScoreMod::Head mod_head_;
  int q_offset_, kv_offset_;
  const BiasElement* bias_;
  long long bias_row_stride_, bias_column_stride_;
  float* dbias_;
  long long dbias_row_stride_, dbias_column_stride_;
};

// The cheap form of a program, with BackwardHead::kHasQueryRun. A bound BackwardHead is many registers; this is what a
// lane needs of one (outer element, query head) for live tiles.
template <class ScoreMod>
struct QueryRunHead {
  typename ScoreMod::Head mod;
  float scale;
  int q_offset, kv_idx;

  // `kv`: the first of the lane's keys.
  FKL_DEVICE void bind(const CommonParams& params, const OuterIndex& outer, int head, int kv) {
    mod = ScoreMod::bind(params, outer).bind_head(global_batch(params, outer), global_head(params, outer, head));
    scale = __ldg(at_outer<const float>(params.scale, outer));
    q_offset = int_or(params.q_offset, outer, 0);
    kv_idx = wrapping_add(kv, int_or(params.kv_offset, outer, 0));
  }
};

// Two keys of a lane, kv and kv + 8, and some query rows, whose first is `q` and whose last is `last` rows further.
template <class ScoreMod>
struct QueryRuns {
  typename ScoreMod::QueryRun run[2];

  static FKL_DEVICE QueryRuns bind(const QueryRunHead<ScoreMod>& head, int q, int last, RunGuard& guard) {
    const auto row = mod().bind_row(head.mod, wrapping_add(q, head.q_offset));
    QueryRuns runs;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      runs.run[half] =
          mod().bind_query_run(head.mod, row, wrapping_add(head.kv_idx, 8 * half), last, head.scale, guard);
    return runs;
  }
  // Does the cheap form do for this score?
  FKL_DEVICE void look(int half, float product, int j, RunGuard& guard) const {
    mod().look(run[half], product, j, guard);
  }
  // P, and the program's derivative.
  FKL_DEVICE float prob(int half, float product, int j, float lse_log2, float* slope) const {
    return exp2_approx(mod().exponent(run[half], product, j, -lse_log2, slope));
  }
  FKL_DEVICE void follow(float p, unsigned zero) {
    run[0].follow(p, zero);
    run[1].follow(p, zero);
  }

 private:
  static FKL_DEVICE ScoreMod mod() { return ScoreMod{}; }  // a cheap form reads no captures
};

// The same value, but the compiler does not know: keeps addresses that are cheap to make from occupying registers
// throughout a loop.
template <class T>
FKL_DEVICE T opaque(T value) {
  static_assert(sizeof(T) == 4, "one register");
  asm volatile("" : "+r"(value));
  return value;
}

// ---- Products of tiles, for one warp.

// acc += A B^T for 16 rows of A and 16 * kPairs rows of B, both stored along k.
template <class Mma, class TileA, class TileB, int kPairs>
FKL_DEVICE void multiply_rows(float (&acc)[2 * kPairs][4], typename Mma::Base a_base, typename Mma::Base b_base) {
#pragma unroll
  for (int k_step = 0; k_step < TileA::kColumns / Mma::kK; ++k_step) {
    typename Mma::FragmentA a;
    Mma::template load_a<TileA>(a, a_base, 0, k_step);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      typename Mma::FragmentB b[2];
      Mma::template load_b_pair<TileB>(b, b_base, 16 * pair, k_step);
      Mma::multiply(acc[2 * pair], a, b[0]);
      Mma::multiply(acc[2 * pair + 1], a, b[1]);
    }
  }
}

// acc += A B for one k step: columns first_pair * 16 ... of B, stored with k along its rows; pairs beyond the tile are
// left out.
template <class Mma, class TileB, int kPairs, class TransBase>
FKL_DEVICE void multiply_columns(float (&acc)[2 * kPairs][4], const typename Mma::FragmentA& a, TransBase b_base,
                                 int first_pair, int k_step) {
  constexpr int kTilePairs = TileB::kColumns / 16;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (kTilePairs % kPairs != 0 && first_pair + pair >= kTilePairs) break;
    typename Mma::FragmentB b[2];
    Mma::template load_b_pair_trans<TileB>(b, b_base, 16 * (first_pair + pair), k_step);
    Mma::multiply(acc[2 * pair], a, b[0]);
    Mma::multiply(acc[2 * pair + 1], a, b[1]);
  }
}

template <int kTiles>
FKL_DEVICE void clear(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[tile][i] = 0.0f;
  }
}

// 16 rows and 16 * kPairs columns of accumulators, times `factor`, to global memory.
template <bool kAligned, int kTilePairs, int kPairs, class Element>
FKL_DEVICE void store_accumulators(Element* data, long long row_stride, int first_row, int num_rows, int first_pair,
                                   int num_columns, int lane, float factor, const float (&acc)[2 * kPairs][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    if (row >= num_rows) continue;
    Element* out = data + row * row_stride;
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      if (kTilePairs % kPairs != 0 && first_pair + tile / 2 >= kTilePairs) break;
      store_pair<kAligned>(out, 16 * first_pair + 8 * tile + 2 * (lane % 4), num_columns, acc[tile][2 * half] * factor,
                           acc[tile][2 * half + 1] * factor);
    }
  }
}

// ---- The float accumulator of dQ.
//
// A tile of kQTile rows is stored as blocks of 16 x 16 in the order of the fragments, so that one instruction of a warp
// adds to 128 (512 from sm_90 on, four values per lane) contiguous bytes. Block (m, pair) is block m * pairs + pair;
// its value `i` (0, 1: columns 2t, 2t + 1; 2, 3: columns 8 + 2t, 9 + 2t) of row g + 8 * half is here:
struct DqueryBlock {
  static constexpr int kFloats = 256;
  static FKL_DEVICE int offset(int half, int lane, int i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return 128 * half + 4 * lane + i;
#else
    return 128 * half + 32 * i + lane;
#endif
  }
  static FKL_DEVICE void load(const float* block, int half, int lane, float (&value)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const Chunk16 chunk = load_global_16(block + offset(half, lane, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __uint_as_float(chunk.word[i]);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = block[offset(half, lane, i)];
#endif
  }
  // `left` and `right`: the accumulators of the block's two n tiles.
  static FKL_DEVICE void add(float* block, int lane, const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      reduce_add_global_4(block + offset(half, lane, 0), left[2 * half], left[2 * half + 1], right[2 * half],
                          right[2 * half + 1]);
#else
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        reduce_add_global(block + offset(half, lane, i), i < 2 ? left[2 * half + i] : right[2 * half + i - 2]);
      }
#endif
    }
  }
};

// Where a query row's statistics start: row 0 of (outer, head).
FKL_DEVICE long long padded_row(const BackwardParams& params, long long outer, int head) {
  return (outer * params.common.num_q_heads + head) * params.padded_q_rows;
}

// Which keys a block owns. Blocks that run together share few heads, whose queries stay in the L2 cache; within such a
// section the first keys come first: under a causal mask they have the most work.
struct KeyBlock {
  int tile, kv_head;
  long long outer;

  static FKL_DEVICE KeyBlock of(const CommonParams& params, unsigned block, int num_tiles, int bytes_per_row,
                                int section_megabytes = 32) {
    // A grid has less than 2^31 blocks, so all numbers of heads and blocks are of 32 bits.
    const unsigned kv_heads = static_cast<unsigned>(params.num_kv_heads);
    const unsigned heads = static_cast<unsigned>(params.num_outer) * kv_heads;
    const long long section_bytes = static_cast<long long>(section_megabytes) << 20;
    const long long head_bytes =
        static_cast<long long>(params.num_q_heads / params.num_kv_heads) * params.q_seq_len * bytes_per_row;
    unsigned section = 1;
    if (head_bytes < section_bytes)
      section = min_unsigned(heads, static_cast<unsigned>(section_bytes) / static_cast<unsigned>(head_bytes));
    const unsigned blocks_per_section = section * static_cast<unsigned>(num_tiles);
    const unsigned section_index = block / blocks_per_section;
    const unsigned rest = block % blocks_per_section;
    const unsigned first_head = section_index * section;
    const unsigned section_heads = min_unsigned(heads - first_head, section);
    const unsigned head = first_head + rest % section_heads;
    return {static_cast<int>(rest / section_heads), static_cast<int>(head % kv_heads),
            static_cast<long long>(head / kv_heads)};
  }

 private:
  static FKL_DEVICE unsigned min_unsigned(unsigned a, unsigned b) { return a < b ? a : b; }
};

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_SCORES_CUH_
