// The online softmax of the 16 rows that one warp holds in wgmma accumulators, with a maximum that is hardly ever
// looked for. A lane has rows g and g + 8 and shares each with the three other lanes of its quad.
//
// What is subtracted in the exponent is free as long as nothing overflows. The first tile of keys gives a row its
// maximum; P of later tiles is made with it at once. Only if a lane's sum over a tile is not below kMaxSum (infinity
// and NaN fail too) does its warp do the tile again from the scores: maximum, rescaling, P. That leaves maximum,
// shuffles and rescaling out of the loop.
#ifndef FKL_DEVICE_ATTENTION_STALE_SOFTMAX_CUH_
#define FKL_DEVICE_ATTENTION_STALE_SOFTMAX_CUH_

#include "core/math.cuh"
#include "core/ptx.cuh"

namespace fkl {

template <class Element>
struct StaleSoftmax {
  // Of a row without a live score yet. Finite: the exponent of a dead score is -inf then, that of the first live one
  // overflows, and neither needs a question.
  static constexpr float kNoMax = -3.0e38f;
  // P must not exceed what the element holds; else this only guards against overflow.
  static constexpr float kMaxSum = IsSame<Element, Float16>::kValue ? 32768.0f : 65536.0f;

  float row_max_log2[2];
  float row_sum[2];  // the lane's own part

  FKL_DEVICE void clear() {
    row_max_log2[0] = row_max_log2[1] = kNoMax;
    row_sum[0] = row_sum[1] = 0.0f;
  }

  // Scores in units of log2, less the rows' maxima.
  template <int kTiles>
  struct Exponents {
    const float (&acc_s)[kTiles][4];
    float to_log2, shift[2];

    FKL_DEVICE float of(int tile, int i) const { return fmaf(acc_s[tile][i], to_log2, shift[i / 2]); }
    FKL_DEVICE void follow(float) {}
  };

  // P with the maximum so far, packed as the left operand of a matrix product, and what row_sum becomes. False: do not
  // use either, call `update`. `exponents`: as the struct above; `follow` gets a P of a few columns before, so that long
  // computations do not all run first, and spill, but under the exponentials of the columns before.
  template <int kTiles, class Fragment, class ExponentsOf>
  FKL_DEVICE bool try_exponentiate(Fragment (&probs)[kTiles / 2], float (&total)[2], ExponentsOf exponents) const {
    constexpr int kAhead = 3;
    float sum[2] = {0.0f, 0.0f}, last[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile >= kAhead) exponents.follow(last[tile - kAhead]);
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2_approx(exponents.of(tile, i));
        sum[i / 2] += p[i];
      }
      last[tile] = p[3];
      probs[tile / 2].reg[tile % 2 * 2] = Conversion<Element>::pack(p[0], p[1]);
      probs[tile / 2].reg[tile % 2 * 2 + 1] = Conversion<Element>::pack(p[2], p[3]);
    }
    total[0] = row_sum[0] + sum[0];
    total[1] = row_sum[1] + sum[1];
    return sum[0] <= kMaxSum && sum[1] <= kMaxSum;
  }
  template <int kTiles, class Fragment>
  FKL_DEVICE bool try_exponentiate(Fragment (&probs)[kTiles / 2], float (&total)[2], const float (&acc_s)[kTiles][4],
                                   float to_log2) const {
    return try_exponentiate<kTiles>(probs, total,
                                    Exponents<kTiles>{acc_s, to_log2, {-row_max_log2[0], -row_max_log2[1]}});
  }

  // Finds the maximum first. `factor`: what the accumulated values must be multiplied with.
  template <int kTiles, class Fragment>
  FKL_DEVICE void update(Fragment (&probs)[kTiles / 2], float (&factor)[2], const float (&acc_s)[kTiles][4],
                         float to_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
      for (int tile = 1; tile < kTiles; ++tile) x = fmaxf(fmaxf(x, acc_s[tile][2 * half]), acc_s[tile][2 * half + 1]);
      // fmaxf drops NaN; it comes back in the sum.
      const float before = row_max_log2[half], after = fmaxf(before, quad_max(x) * to_log2);
      factor[half] = exp2_approx(before - after);
      row_max_log2[half] = after;
      row_sum[half] *= factor[half];
    }
    float total[2];
    try_exponentiate(probs, total, acc_s, to_log2);
    row_sum[0] = total[0];
    row_sum[1] = total[1];
  }

  // Sums over the quads.
  FKL_DEVICE void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_sum[half] = quad_sum(row_sum[half]);
      if (row_max_log2[half] == kNoMax) row_max_log2[half] = -infinity();
    }
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_STALE_SOFTMAX_CUH_
