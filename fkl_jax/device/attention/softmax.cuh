// The online softmax of the rows that one warp holds in mma accumulators, in units of log2.
//
// A lane has kMTiles * 2 rows (accumulator_row) and shares each with the three other lanes of its quad. `row_max_log2`
// is the same in the quad, `row_sum` is the lane's own part until `finish`.
//
// The maximum is allowed to lag: as long as no score exceeds it by more than kMaxGrowth, P stays below 2^kMaxGrowth
// (which float16 holds), and the reduction over the quad and the rescaling of the accumulators are left out. After the
// first few tiles that is nearly always so.
#ifndef FKL_DEVICE_ATTENTION_SOFTMAX_CUH_
#define FKL_DEVICE_ATTENTION_SOFTMAX_CUH_

#include "core/math.cuh"
#include "core/ptx.cuh"

namespace fkl {

template <int kMTiles>
struct OnlineSoftmax {
  static constexpr float kMaxGrowth = 8.0f;

  float row_max_log2[kMTiles][2];  // -inf: no live score yet
  float row_sum[kMTiles][2];

  FKL_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max_log2[m][half] = -infinity();
        row_sum[m][half] = 0.0f;
      }
    }
  }

  // Scores become P; `to_log2` > 0 takes scores to log2 units; dead ones are -inf. A NaN is no maximum (fmaxf drops
  // it), but makes P and with it the row's sum NaN.
  template <int kScoreTiles, int kOutTiles>
  FKL_DEVICE void update(float (&acc_s)[kMTiles][kScoreTiles][4], float (&acc_o)[kMTiles][kOutTiles][4],
                         float to_log2) {
    float tile_max[kMTiles][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(acc_s[m][0][2 * half], acc_s[m][0][2 * half + 1]);
#pragma unroll
        for (int tile = 1; tile < kScoreTiles; ++tile)
          x = fmaxf(fmaxf(x, acc_s[m][tile][2 * half]), acc_s[m][tile][2 * half + 1]);
        tile_max[m][half] = x;
        // False for NaN, which only comes from two equal infinities.
        grows |= fmaf(x, to_log2, -row_max_log2[m][half]) > kMaxGrowth;
      }
    }
    if (__any_sync(0xffffffffu, grows)) rescale(tile_max, acc_o, to_log2);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_max = row_max_log2[m][half];
        // Nothing live yet: all scores are -inf, and -inf - (-inf) would be NaN.
        const float shift = row_max == -infinity() ? 0.0f : -row_max;
        float sum = row_sum[m][half];
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            acc_s[m][tile][i] = exp2_approx(fmaf(acc_s[m][tile][i], to_log2, shift));
            sum += acc_s[m][tile][i];
          }
        }
        row_sum[m][half] = sum;
      }
    }
  }

  // Sums over the quads.
  FKL_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] = quad_sum(row_sum[m][half]);
    }
  }

 private:
  template <int kOutTiles>
  FKL_DEVICE void rescale(const float (&tile_max)[kMTiles][2], float (&acc_o)[kMTiles][kOutTiles][4], float to_log2) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = row_max_log2[m][half];
        const float after = fmaxf(before, quad_max(tile_max[m][half]) * to_log2);
        const float factor = before == after ? 1.0f : exp2_approx(before - after);
        row_max_log2[m][half] = after;
        row_sum[m][half] *= factor;
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
          acc_o[m][tile][2 * half] *= factor;
          acc_o[m][tile][2 * half + 1] *= factor;
        }
      }
    }
  }
};

// What a row ends with. The sink takes part in the denominator only.
struct RowResult {
  float factor;   // of the accumulated values
  float lse;      // natural logarithm, -inf on an empty row
  bool is_empty;  // out is 0, whatever was accumulated

  // `sink`: natural logarithm of its weight, -inf if there is none. A row whose sum is NaN is not empty: it is NaN.
  static FKL_DEVICE RowResult of(float row_max_log2, float row_sum, float sink) {
    RowResult result;
    result.is_empty = row_sum == 0.0f;
    float weight = 1.0f;
    if (sink != -infinity()) {
      const float sink_log2 = sink * kLog2e;
      // Not fmaxf: a NaN sink must show.
      const float total_max = row_max_log2 > sink_log2 ? row_max_log2 : sink_log2;
      if (!result.is_empty && row_max_log2 != -infinity()) weight = exp2_approx(row_max_log2 - total_max);
      row_sum = weight * row_sum + exp2_approx(sink_log2 - total_max);
      row_max_log2 = total_max;
    }
    result.factor = weight / row_sum;
    const float sum_log2 = log2_approx(row_sum);
    result.lse = row_sum == 0.0f ? -infinity() : row_sum != row_sum ? row_sum : (row_max_log2 + sum_log2) * kLn2;
    return result;
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_SOFTMAX_CUH_
