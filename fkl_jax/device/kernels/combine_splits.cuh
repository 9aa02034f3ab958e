// Merges the partial results of split keys: out = sum over splits of exp(lse_s - lse) out_s, with the sink in lse.
//
// A warp per query row of a head, the splits in ascending order, so results repeat bitwise.
#ifndef FKL_DEVICE_KERNELS_COMBINE_SPLITS_CUH_
#define FKL_DEVICE_KERNELS_COMBINE_SPLITS_CUH_

#include "attention/mods.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/softmax.cuh"
#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/copy.cuh"

namespace fkl {

constexpr int kCombineWarps = 4;  // rows of a block

template <class Config>
constexpr int combine_splits_shared_bytes = 4 * kCombineWarps * kMaxSplits;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void combine_splits(const ForwardParams& params) {
  using Element = typename Config::Element;
  alignas(16) extern __shared__ unsigned char combine_shared[];
  const CommonParams& common = params.common;
  const int warp = warp_index(), lane = lane_index();
  const int num_tiles = ceil_div(common.q_seq_len, kCombineWarps);
  const int block = static_cast<int>(blockIdx.x);
  const int q = block % num_tiles * kCombineWarps + warp;
  const int head = block / num_tiles % common.num_q_heads;
  const long long outer_number = block / num_tiles / common.num_q_heads;
  if (q >= common.q_seq_len) return;
  const OuterIndex outer = outer_index(common, outer_number);
  const long long row = (outer_number * common.num_q_heads + head) * common.q_seq_len + q;
  const long long num_rows = common.num_outer * common.num_q_heads * common.q_seq_len;
  const int num_splits = params.num_splits;
  float* weights = reinterpret_cast<float*>(combine_shared) + warp * kMaxSplits;

  float row_max = -infinity();
  for (int split = lane; split < num_splits; split += kWarpSize) {
    const float lse = params.partial_lse[split * num_rows + row];
    weights[split] = lse;
    row_max = fmaxf(row_max, lse);
  }
#pragma unroll
  for (int bit = 1; bit < kWarpSize; bit *= 2) row_max = fmaxf(row_max, shuffle_xor(row_max, bit));
  float row_sum = 0.0f;
  for (int split = lane; split < num_splits; split += kWarpSize) {
    const float lse = weights[split];
    // Splits without a live key have weight 0, also if all are such; a NaN stays one.
    const float weight = lse == row_max ? (lse == -infinity() ? 0.0f : 1.0f) : exp2_approx((lse - row_max) * kLog2e);
    weights[split] = weight;
    row_sum += weight;
  }
#pragma unroll
  for (int bit = 1; bit < kWarpSize; bit *= 2) row_sum += shuffle_xor(row_sum, bit);
  __syncwarp();

  float sink = -infinity();
  if constexpr (Config::kHasSinks) {
    // Rows beyond the query length are empty, sink or not.
    const int q_end = Config::kHasQLengths ? int_or(common.q_seq_lengths, outer, common.q_seq_len) : common.q_seq_len;
    if (q < q_end) sink = __ldg(at_outer<const float>(common.sinks, outer) + head);
  }
  const RowResult result = RowResult::of(row_max * kLog2e, row_sum, sink);
  if (lane == 0) params.lse[row] = result.lse;
  Element* out = at_outer<Element>(params.out, outer, head) + q * params.out.row_stride;
  for (int column = 2 * lane; column < common.value_head_dim; column += 2 * kWarpSize) {
    const bool has_second = column + 1 < common.value_head_dim;
    float x = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int split = 0; split < num_splits; ++split) {
      const float weight = weights[split];
      const float* partial = params.partial_out + (split * num_rows + row) * common.value_head_dim + column;
      x = fmaf(weight, partial[0], x);
      y = fmaf(weight, has_second ? partial[1] : 0.0f, y);
    }
    x = result.is_empty ? 0.0f : x * result.factor;
    y = result.is_empty ? 0.0f : y * result.factor;
    store_pair<Config::kAligned>(out, column, common.value_head_dim, x, y);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_COMBINE_SPLITS_CUH_
