// The small kernels around backward_keys_sm90: as those of backward_rows_sm80, with statistics that accumulators can
// start from.
#ifndef FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_

#include "kernels/backward_rows_sm80.cuh"

namespace fkl {

// Columns of dK, and of the accumulator of dQ, which the two warpgroups divide by rows, or as 64 columns and the rest.
FKL_CONSTEXPR int gradient_width(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : 128; }

// Where the blocks of 16 x 16 of a tile of dQ are (DqueryBlock): what a warpgroup adds is contiguous.
template <class Config>
struct DqueryOrderSm90 {
  static constexpr int kColumns = Config::kSharesKeys ? Config::kHeadDim : gradient_width(Config::kHeadDim);
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

// What the kernels keep in `scratch`, which is zero at first: the number of the next block, a word per query tile of
// every head, and for deterministic calls the turns of the tiles' parts and the tiles' terms of dscale.
template <class Config>
struct TileScratch {
  const BackwardParams& params;

  FKL_DEVICE int tiles_per_head() const { return ceil_div(params.common.q_seq_len, Config::kQTile); }
  FKL_DEVICE long long index(long long outer, int head, int tile) const {
    return (outer * params.common.num_q_heads + head) * tiles_per_head() + tile;
  }
  FKL_DEVICE long long num_tiles() const { return index(params.common.num_outer, 0, 0); }

  FKL_DEVICE int* ticket() const { return static_cast<int*>(params.scratch); }
  // Not 0: rows of the query tile are marked (backward_scores.cuh).
  FKL_DEVICE int* mark(long long outer, int head, int tile) const { return ticket() + 1 + index(outer, head, tile); }
  // 1 + the last tile of keys that has been added to the part of dQ. Tiles are numbered as in `index`.
  FKL_DEVICE int* turn(long long tile, int part) const { return ticket() + 1 + num_tiles() + 2 * tile + part; }
  FKL_DEVICE float* dscale(long long outer) const {
    return reinterpret_cast<float*>(ticket() + 1 + 3 * num_tiles() + index(outer, 0, 0));
  }
};

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
    if (is_marked) *TileScratch<Config>{params}.mark(block.outer, block.head, block.tile) = 1;
  });
}

template <class Config>
constexpr int backward_finish_sm90_shared_bytes = backward_finish_sm80_shared_bytes<Config>;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_finish_sm90(const BackwardParams& params) {
  finish_rows<Config, DqueryOrderSm90<Config>>(params, [&](const RowBlock& block, float dscale) {
    if constexpr (Config::kDeterministic) {
      const TileScratch<Config> scratch{params};
      scratch.dscale(block.outer)[block.head * scratch.tiles_per_head() + block.tile] = dscale;
    } else {
      add_dscale(params, block, dscale);
    }
  });
}

template <class Config>
constexpr int backward_sum_dscale_sm90_shared_bytes = backward_sum_dscale_sm80_shared_bytes<Config>;

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_sum_dscale_sm90(const BackwardParams& params) {
  if constexpr (Config::kHasDscale) {
    const TileScratch<Config> scratch{params};
    sum_dscale(params, scratch.dscale(0), params.common.num_q_heads * scratch.tiles_per_head());
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_ROWS_SM90_CUH_
