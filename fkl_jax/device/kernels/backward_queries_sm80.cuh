// dQ of deterministic calls: a block owns kQueriesQTile query rows of one head and goes through their live key tiles,
// so every sum has one order. It computes the scores once more (7 products instead of 5), but nothing is added in
// global memory and the scores stay in registers: each warp has 16 query rows.
//
//   S = Q K^T,  dP = dO V^T (from -delta),  dS in registers,  dQ += dS K
#ifndef FKL_DEVICE_KERNELS_BACKWARD_QUERIES_SM80_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_QUERIES_SM80_CUH_

#include "kernels/backward_rows_sm80.cuh"
#include "kernels/backward_scores.cuh"

namespace fkl {

template <class Config>
struct BackwardQueriesShape {
  using Element = typename Config::Element;
  static constexpr int kQTile = Config::kQueriesQTile, kKvTile = Config::kQueriesKvTile;
  static constexpr int kWarps = kQTile / 16, kThreads = kWarps * kWarpSize;
  static constexpr int kStages = Config::kQueriesNumStages;  // of K and V
  static_assert(kQTile % 16 == 0 && kKvTile % 16 == 0, "fragments");
  static_assert(kStages == 1 || kStages == 2, "a stage is found by one bit");

  using QueryTile = TileLayout<Element, kQTile, Config::kHeadDim>;
  using DoutTile = TileLayout<Element, kQTile, Config::kValueHeadDim>;
  using KeyTile = TileLayout<Element, kKvTile, Config::kHeadDim>;
  using ValueTile = TileLayout<Element, kKvTile, Config::kValueHeadDim>;

  static constexpr int kDout = QueryTile::kBytes;
  static constexpr int kKey = kDout + DoutTile::kBytes;
  static constexpr int kValue = kKey + kStages * KeyTile::kBytes;
  static constexpr int kPoisoned = kValue + kStages * ValueTile::kBytes;  // a byte per key of the tile
  static constexpr int kSharedBytes = kPoisoned + round_up(kKvTile, 16);
};

template <class Config>
constexpr int backward_queries_sm80_shared_bytes = BackwardQueriesShape<Config>::kSharedBytes;

template <class Config, class ScoreMod, class MaskMod>
struct BackwardQueries {
  using Shape = BackwardQueriesShape<Config>;
  using Element = typename Config::Element;
  using MmaType = Mma<Element, Config::kFullPrecision>;
  using Head = BackwardHead<Config, ScoreMod, MaskMod, false>;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  static constexpr int kKvTile = Shape::kKvTile, kTiles = kKvTile / 8;

  struct KeyCopies {
    TileCopy<KeyTile, Config::kAligned, Shape::kThreads> key;
    TileCopy<ValueTile, Config::kAligned, Shape::kThreads> value;
    int kv_end;
  };

  static FKL_DEVICE void load_keys(const KeyCopies& copies, uint32_t shared, int stage, int tile) {
    copies.key.copy(shared + Shape::kKey + stage * KeyTile::kBytes, tile * kKvTile, copies.kv_end);
    copies.value.copy(shared + Shape::kValue + stage * ValueTile::kBytes, tile * kKvTile, copies.kv_end);
    cp_async_commit();
  }

  // Of a mixed tile: keys that are not finite are cleared and marked, so that a dS of 0 does not meet them.
  static FKL_DEVICE void clear_poisoned_keys(uint32_t key_tile, uint8_t* poisoned, int warp, int lane) {
    for (int row = warp; row < kKvTile; row += Shape::kWarps) {
      const bool is_poisoned = row_has_non_finite<KeyTile>(key_tile, row, lane);
      if (is_poisoned) clear_row<KeyTile>(key_tile, row, lane);
      if (lane == 0) poisoned[row] = is_poisoned;
    }
    __syncthreads();
  }

  // S and dP - delta become P and dS. `q`, `kv`: of the lane's first accumulator; `column`: kv in the tile.
  template <bool kIsMixed>
  static FKL_DEVICE void score_gradients(Head& head, float (&acc_s)[kTiles][4], float (&acc_dp)[kTiles][4],
                                         const float (&lse_log2)[2], int q, int kv, int column,
                                         const uint8_t* poisoned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto row = head.template bind_row<kIsMixed>(q + 8 * half);
      typename ScoreMod::RowGrads row_grads{};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool is_poisoned = kIsMixed && !Head::Mask::kIsTrivial && poisoned[column + 8 * tile + i] != 0;
          head.template element<kIsMixed>(row, q + 8 * half, kv + 8 * tile + i, is_poisoned, lse_log2[half],
                                          acc_s[tile][2 * half + i], acc_dp[tile][2 * half + i], row_grads);
        }
      }
    }
  }
};

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_queries_sm80(const BackwardParams& params) {
  using Kernel = BackwardQueries<Config, ScoreMod, MaskMod>;
  using Shape = BackwardQueriesShape<Config>;
  using Element = typename Config::Element;
  using MmaType = typename Kernel::MmaType;
  using Head = typename Kernel::Head;
  using QueryTile = typename Shape::QueryTile;
  using DoutTile = typename Shape::DoutTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile, kTiles = Kernel::kTiles;
  constexpr int kPairsK = Config::kHeadDim / 16;

  alignas(kSharedAlignment) extern __shared__ unsigned char backward_shared[];
  const uint32_t shared = shared_address(backward_shared);
  uint8_t* poisoned = backward_shared + Shape::kPoisoned;
  if (params.dquery.data == nullptr && !Config::kHasDscale) return;
  const CommonParams& common = params.common;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_index(), lane = lane_index();
  // The last rows first: under a causal mask they have the most keys.
  const RowBlock block = RowBlock::of(common, gridDim.x - 1 - blockIdx.x, kQTile);
  const OuterIndex outer = outer_index(common, block.outer);
  const int q_first = block.tile * kQTile;
  const int kv_head = block.head / (common.num_q_heads / common.num_kv_heads);

  Head head;
  head.bind(params, outer, block.head);
  float acc_dq[2 * kPairsK][4];
  clear(acc_dq);

  TileWalk<typename Head::Mask, kQTile, kKvTile, true> walk(head.mask, q_first, q_first + kQTile - 1, 0,
                                                            ceil_div(common.kv_seq_len, kKvTile));
  int next_tile = 0, next_state = kTileDead;
  bool has_next = walk.next(head.mask, &next_tile, &next_state);
  const int row = warp * 16 + lane / 4;  // of the lane's first accumulator in the tile
  if (has_next) {
    const TileCopy<QueryTile, Config::kAligned, Shape::kThreads> query(
        at_outer<const Element>(common.query, outer, block.head), common.query.row_stride, common.head_dim, thread);
    const TileCopy<DoutTile, Config::kAligned, Shape::kThreads> dout(
        at_outer<const Element>(params.dout, outer, block.head), params.dout.row_stride, common.value_head_dim, thread);
    query.copy(shared, q_first, head.mask.q_end());
    dout.copy(shared + Shape::kDout, q_first, head.mask.q_end());
  }
  const typename Kernel::KeyCopies copies{
      {at_outer<const Element>(common.key, outer, kv_head), common.key.row_stride, common.head_dim, thread},
      {at_outer<const Element>(common.value, outer, kv_head), common.value.row_stride, common.value_head_dim, thread},
      head.mask.kv_end()};
  float lse_log2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const long long r = padded_row(params, block.outer, block.head) + q_first + row + 8 * half;
    const bool exists = q_first + row + 8 * half < common.q_seq_len;
    lse_log2[half] = exists ? params.lse_log2[r] : infinity();
    delta[half] = exists ? params.delta[r] : 0.0f;
  }
  int stage = 0;
  if (has_next) Kernel::load_keys(copies, shared, stage, next_tile);

  while (has_next) {
    const int kv_first = next_tile * kKvTile;
    const bool is_mixed = next_state == kTileMixed;
    has_next = walk.next(head.mask, &next_tile, &next_state);
    cp_async_wait<0>();
    __syncthreads();
    if (Shape::kStages == 2 && has_next) Kernel::load_keys(copies, shared, stage ^ 1, next_tile);
    const uint32_t key = shared + Shape::kKey + stage * KeyTile::kBytes;
    const uint32_t value = shared + Shape::kValue + stage * ValueTile::kBytes;
    if constexpr (!Head::Mask::kIsTrivial) {
      if (is_mixed) Kernel::clear_poisoned_keys(key, poisoned, warp, lane);
    }

    // A marked row's Q and dO meet no dS of another row here: its own P and dS are 0 by selection, or NaN.
    float acc_s[kTiles][4], acc_dp[kTiles][4];
    clear(acc_s);
    multiply_rows<MmaType, QueryTile, KeyTile, kTiles / 2>(
        acc_s, MmaType::template a_base<QueryTile>(shared + warp * 16 * QueryTile::kRowBytes, lane),
        MmaType::template b_base<KeyTile>(key, lane));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      acc_dp[tile][0] = acc_dp[tile][1] = -delta[0];
      acc_dp[tile][2] = acc_dp[tile][3] = -delta[1];
    }
    multiply_rows<MmaType, DoutTile, ValueTile, kTiles / 2>(
        acc_dp, MmaType::template a_base<DoutTile>(shared + Shape::kDout + warp * 16 * DoutTile::kRowBytes, lane),
        MmaType::template b_base<ValueTile>(value, lane));
    const int column = 2 * (lane % 4);
    if (is_mixed) {
      Kernel::template score_gradients<true>(head, acc_s, acc_dp, lse_log2, q_first + row, kv_first + column, column,
                                             poisoned);
    } else {
      Kernel::template score_gradients<false>(head, acc_s, acc_dp, lse_log2, q_first + row, kv_first + column, column,
                                              poisoned);
    }
    const auto key_base = MmaType::template b_trans_base<KeyTile>(key, lane);
#pragma unroll
    for (int k_step = 0; k_step < kKvTile / MmaType::kK; ++k_step) {
      typename MmaType::FragmentA a;
      MmaType::a_from_accumulators(a, acc_dp, k_step);
      multiply_columns<MmaType, KeyTile, kPairsK>(acc_dq, a, key_base, 0, k_step);
    }
    if (Shape::kStages == 1) {
      __syncthreads();
      if (has_next) Kernel::load_keys(copies, shared, stage, next_tile);
    } else {
      stage ^= 1;
    }
  }

  if (params.dquery.data != nullptr) {
    store_accumulators<Config::kAligned, kPairsK, kPairsK>(
        at_outer<Element>(params.dquery, outer, block.head), params.dquery.row_stride, q_first + warp * 16,
        common.q_seq_len, 0, common.head_dim, lane, head.scale, acc_dq);
  }
  if constexpr (Config::kHasDscale) {
    const Element* query = at_outer<const Element>(common.query, outer, block.head);
    float dscale = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2 * kPairsK; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = q_first + row + 8 * (i / 2), column = 8 * tile + 2 * (lane % 4) + i % 2;
        if (q < common.q_seq_len && column < common.head_dim && acc_dq[tile][i] != 0.0f) {
          dscale = fmaf(to_float(query[q * common.query.row_stride + column]), acc_dq[tile][i], dscale);
        }
      }
    }
    __syncthreads();
    const float sum = block_sum<Shape::kWarps>(dscale, reinterpret_cast<float*>(backward_shared));
    if (thread == 0) {
      const int num_tiles = ceil_div(common.q_seq_len, kQTile);
      static_cast<float*>(params.scratch)[(block.outer * common.num_q_heads + block.head) * num_tiles + block.tile] =
          sum;
    }
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_QUERIES_SM80_CUH_
