// From q . k to the score that the softmax sees, for one (outer element, query head): scale, bias, score program,
// masks.
//
// Without bias and program the scale is left to the softmax, which folds it into its exponent: a live tile then costs
// nothing here.
#ifndef FKL_DEVICE_ATTENTION_FORWARD_SCORES_CUH_
#define FKL_DEVICE_ATTENTION_FORWARD_SCORES_CUH_

#include "attention/mods.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/score_mask.cuh"
#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/layout.cuh"

namespace fkl {

FKL_DEVICE float load_bias(const float* pointer) { return __ldg(pointer); }
FKL_DEVICE float load_bias(const BFloat16* pointer) { return to_float(BFloat16{__ldg(&pointer->bits)}); }
FKL_DEVICE float load_bias(const Float16* pointer) { return to_float(Float16{__ldg(&pointer->bits)}); }

template <class Config, class ScoreMod, class MaskMod>
struct ForwardScores {
  using Mask = ScoreMask<Config, MaskMod>;
  using BiasElement = typename Config::BiasElement;
  static constexpr bool kIsPlain = ScoreMod::kIsIdentity && !Config::kHasBias;
  // Tiles need not go through `apply`: the program is part of the softmax's exponent. That made a soft cap 1.45 and
  // ALiBi 1.3 times as fast (H200, 128 columns, causal).
  static constexpr bool kHasExponent = !ScoreMod::kIsIdentity && !Config::kHasBias;

  Mask mask;
  float to_log2;  // factor of the softmax, positive

  // `head` stands for all heads of a group if rows are packed (Config::kMergedQuery).
  FKL_DEVICE void bind(const CommonParams& params, const OuterIndex& outer, int head) {
    mask.bind(params, outer, head);
    const float scale = __ldg(at_outer<const float>(params.scale, outer));
    if constexpr (kIsPlain) {
      // The maximum is taken before scaling, so the sign, and a scale of 0, go into the scores first.
      factor_ = scale > 0.0f ? 1.0f : scale < 0.0f ? -1.0f : scale;
      to_log2 = (scale == 0.0f ? 1.0f : fabsf(scale)) * kLog2e;
    } else {
      factor_ = scale;
      to_log2 = kLog2e;
    }
    if constexpr (Config::kHasBias) {
      bias_ = at_outer<const BiasElement>(params.bias, outer, head);
      bias_row_stride_ = params.bias.row_stride;
      bias_column_stride_ = params.bias_column_stride;
    }
    if constexpr (!ScoreMod::kIsIdentity) {
      q_offset_ = int_or(params.q_offset, outer, 0);
      kv_offset_ = int_or(params.kv_offset, outer, 0);
      mod_ = ScoreMod::bind(params, outer);
      mod_head_ = mod_.bind_head(global_batch(params, outer), global_head(params, outer, head));
    }
  }

  // Query rows of a tile may lie beyond q_end: their scores are never used, but memory is only read inside.
  FKL_DEVICE int clip_row(int q) const { return min_int(q, mask.q_end() - 1); }

  // The scores of kMTiles * 16 rows of a warp and 8 * kTiles keys. `row_of(m, half)`: the lane's query rows, clipped;
  // `kv_first`: the lane's first key. Rows are bound again for every tile: four rows' worth of registers are dearer.
  template <bool kIsMixed, int kMTiles, int kTiles, class RowOf>
  FKL_DEVICE void apply(float (&acc_s)[kMTiles][kTiles][4], RowOf row_of, int kv_first) const {
    if constexpr (kIsPlain) {
      if (factor_ != 1.0f) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc_s[m][tile][i] *= factor_;
          }
        }
      }
    }
    if constexpr (kIsPlain && !kIsMixed) {
      return;
    } else {
      modify<kIsMixed>(acc_s, row_of, kv_first);
    }
  }

  // Whether later keys are expected to have larger scores; the first tile should have the largest, or there will be
  // other maxima to look for.
  FKL_DEVICE bool grows() const {
    if constexpr (kHasExponent) return mod_.grows(mod_head_);
    return false;
  }

  // With kHasExponent: the scores of two query rows of a lane and a run of keys, for StaleSoftmax. `acc_s` stays as it
  // is.
  template <bool kIsMixed, int kTiles>
  struct Exponents {
    const ForwardScores& scores;
    const float (&acc_s)[kTiles][4];
    unsigned zero;
    RunGuard& guard;
    typename ScoreMod::Row row[2];
    typename ScoreMod::Run run[2];
    typename Mask::Row mask[2];
    int q[2], kv;

    FKL_DEVICE float of(int tile, int i) const {
      const int half = i / 2, j = 8 * tile + i % 2;
      const float x = scores.mod_.exponent(scores.mod_head_, row[half], run[half], acc_s[tile][i],
                                           wrapping_add(kv + j, scores.kv_offset_), j, guard);
      return kIsMixed && !scores.mask.live(mask[half], q[half], kv + j) ? -infinity() : x;
    }
    FKL_DEVICE void follow(float p) {
      run[0].follow(p, zero);
      run[1].follow(p, zero);
    }
  };
  template <bool kIsMixed, int kTiles, class RowOf>
  FKL_DEVICE Exponents<kIsMixed, kTiles> exponents(const float (&acc_s)[kTiles][4], RowOf row_of, int kv_first,
                                                   const float (&row_max_log2)[2], unsigned zero,
                                                   RunGuard& guard) const {
    Exponents<kIsMixed, kTiles> x{*this, acc_s, zero, guard};
    x.kv = kv_first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x.q[half] = row_of(0, half);
      if constexpr (kIsMixed) x.mask[half] = mask.bind_row(x.q[half]);
      x.row[half] = mod_.bind_row(mod_head_, wrapping_add(x.q[half], q_offset_));
      x.run[half] = mod_.bind_run(mod_head_, x.row[half], wrapping_add(kv_first, kv_offset_), 8 * kTiles - 7, factor_,
                                  -row_max_log2[half], guard);
    }
    return x;
  }

 private:
  template <bool kIsMixed, int kMTiles, int kTiles, class RowOf>
  FKL_DEVICE void modify(float (&acc_s)[kMTiles][kTiles][4], RowOf row_of, int kv_first) const {
    // Two rows at once share what depends on the key; of more the state takes too many registers.
    constexpr int kRows = kMTiles == 1 ? 2 : 1;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int first = 0; first < 2; first += kRows) {
        BoundRow rows[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) rows[r] = bind_row<kIsMixed>(row_of(m, first + r));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int kv = kv_first + 8 * tile + i;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              float& score = acc_s[m][tile][2 * (first + r) + i];
              // Selected: the score of a dead element may be NaN, and its bias may lie outside the array.
              if (kIsMixed && !mask.live(rows[r].mask, rows[r].q, kv)) {
                score = -infinity();
              } else if constexpr (!kIsPlain) {
                score *= factor_;
                if constexpr (Config::kHasBias) score += load_bias(rows[r].bias + kv * bias_column_stride_);
                if constexpr (!ScoreMod::kIsIdentity)
                  score = mod_.score(mod_head_, rows[r].mod, score, wrapping_add(kv, kv_offset_));
              }
            }
          }
        }
      }
    }
  }

  struct BoundRow {
    typename Mask::Row mask;
    typename ScoreMod::Row mod;
    const BiasElement* bias;
    int q;
  };

  template <bool kIsMixed>
  FKL_DEVICE BoundRow bind_row(int q) const {
    BoundRow row{};
    row.q = q;
    if constexpr (kIsMixed) row.mask = mask.bind_row(q);
    if constexpr (!ScoreMod::kIsIdentity) row.mod = mod_.bind_row(mod_head_, wrapping_add(q, q_offset_));
    if constexpr (Config::kHasBias) row.bias = bias_ + q * bias_row_stride_;
    return row;
  }

  float factor_;
  const BiasElement* bias_;
  long long bias_row_stride_, bias_column_stride_;
  int q_offset_, kv_offset_;
  ScoreMod mod_;
  typename ScoreMod::Head mod_head_;
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_FORWARD_SCORES_CUH_
