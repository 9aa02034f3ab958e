// The small kernels around backward_keys_sm90: as those of backward_rows_sm80, with statistics that accumulators can
// start from.
#ifndef FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_

#include "kernels/backward_rows_sm80.cuh"

namespace fkl {

// Columns of dK, and of the accumulator of dQ, which the two warpgroups divide by rows, or as 64 columns and the rest.
FKL_CONSTEXPR int key_gradient_width(int head_dim, int q_tile) {
  return q_tile == 128 ? 64 : head_dim <= 96 ? 96 : 128;
}
FKL_CONSTEXPR int value_gradient_width(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : 128; }

// Where the blocks of 16 x 16 of a tile of dQ are (DqueryBlock): what a warpgroup adds is contiguous.
template <class Config>
struct DqueryOrderSm90 {
  static constexpr int kColumns =
      Config::kSharesKeys ? Config::kHeadDim : key_gradient_width(Config::kHeadDim, Config::kQTile);
  static FKL_DEVICE int index(int m, int n) {
    constexpr int kPairs = kColumns / 16;
    if (Config::kSharesKeys || Config::kQTile == 128) return m * kPairs + n;
    return n < 4 ? m * 4 + n : 16 + m * (kPairs - 4) + n - 4;
  }
};

// P = exp2(factor * S) if S starts from -lse_log2 / factor. A scale of 0 has no such start; the products that so small
// a one adds are lost in the sum.
FKL_DEVICE float softmax_factor(float scale) {
  constexpr float kSmallest = 1e-20f;
  const float factor = scale * kLog2e;
  return fabsf(factor) < kSmallest ? copysignf(kSmallest, factor) : factor;
}

// Not 0: rows of the query tile are marked (backward_scores.cuh).
FKL_DEVICE int* marked_tile(const BackwardParams& params, long long outer, int head, int tile, int q_tile) {
  const int num_tiles = ceil_div(params.common.q_seq_len, q_tile);
  return static_cast<int*>(params.scratch) + (outer * params.common.num_q_heads + head) * num_tiles + tile;
}

template <class Config>
constexpr int backward_preprocess_sm90_shared_bytes = 0;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_preprocess_sm90(const BackwardParams& params) {
  const RowBlock block = RowBlock::of(params.common, blockIdx.x, Config::kQTile);
  const float scale = *at_outer<const float>(params.common.scale, outer_index(params.common, block.outer));
  const float factor = softmax_factor(scale);
  preprocess_rows<Config>(params, [&](long long row, float lse_log2, float delta, bool is_marked) {
    params.lse_log2[row] = ScoreMod::kIsIdentity && !Config::kHasBias ? -lse_log2 / factor : lse_log2;
    params.delta[row] = -delta;
    if (is_marked) *marked_tile(params, block.outer, block.head, block.tile, Config::kQTile) = 1;
  });
}

template <class Config>
constexpr int backward_finish_sm90_shared_bytes = backward_finish_sm80_shared_bytes<Config>;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_finish_sm90(const BackwardParams& params) {
  finish_rows<Config, DqueryOrderSm90<Config>>(params);
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_
