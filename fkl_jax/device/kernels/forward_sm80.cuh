// Forward pass on compute capability 8.0 and newer: mma.sync, ldmatrix, cp.async.
//
// A block owns kQTile query rows of one head and goes through the key tiles that are not dead. Each of its kNumWarps
// warps has kQTile / kNumWarps rows (16 or 32) with all keys of the tile, so the softmax needs no other warp:
//
//   S = Q K^T in registers -> scale, bias, score program, masks -> P = exp2(S - row_max) -> O += P V
//
// Shared memory: Q, then kNumStages tiles of K and of V. With two stages the next tile is copied during the whole work
// on this one. With one stage V is copied during Q K^T, and the next K during the softmax and P V. Two warps per
// scheduler (two blocks of 4 warps or one of 8) make up for one warp's chain of products and exponentials.
#ifndef FKL_DEVICE_KERNELS_FORWARD_SM80_CUH_
#define FKL_DEVICE_KERNELS_FORWARD_SM80_CUH_

#include "attention/forward_scores.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/poisoned_values.cuh"
#include "attention/softmax.cuh"
#include "attention/tile_order.cuh"
#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/copy.cuh"
#include "tile/layout.cuh"
#include "tile/mma.cuh"

namespace fkl {

template <class Config>
struct ForwardShape {
  using Element = typename Config::Element;
  static constexpr int kQTile = Config::kQTile, kKvTile = Config::kKvTile;
  static constexpr int kNumWarps = Config::kNumWarps, kThreads = kNumWarps * kWarpSize;
  static constexpr int kNumStages = Config::kNumStages;
  static constexpr int kMTiles = kQTile / (16 * kNumWarps);
  static_assert(kMTiles > 0 && kQTile == 16 * kNumWarps * kMTiles, "whole fragments for every warp");
  static_assert(kKvTile % 16 == 0 && kKvTile <= 32 * kNumWarps, "pairs of fragments; cleared rows are bits");
  static_assert(kNumStages == 1 || kNumStages == 2, "");

  using QueryTile = TileLayout<Element, kQTile, Config::kHeadDim>;
  using KeyTile = TileLayout<Element, kKvTile, Config::kHeadDim>;
  using ValueTile = TileLayout<Element, kKvTile, Config::kValueHeadDim>;

  static constexpr int kKey = QueryTile::kBytes;
  static constexpr int kValue = kKey + kNumStages * KeyTile::kBytes;
  static constexpr int kCleared = kValue + kNumStages * ValueTile::kBytes;  // a word per warp
  // What the loop needs now and then: the registers are for accumulators. Its size depends on mods, so there is a
  // bound.
  static constexpr int kState = kCleared + round_up(4 * kNumWarps, 16);
  static constexpr int kMaxStateBytes = 1024, kMaxWalkBytes = 64;
  static constexpr int kWalk = kState + kMaxStateBytes;
  static constexpr int kSharedBytes = kWalk + kNumWarps * kMaxWalkBytes;
};

template <class Config>
constexpr int forward_sm80_shared_bytes = ForwardShape<Config>::kSharedBytes;

template <int kMTiles, int kTiles>
FKL_DEVICE void clear_accumulators(float (&acc)[kMTiles][kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][tile][i] = 0.0f;
    }
  }
}

// Q as fragments: kept in registers, or read from shared memory again for every key tile.
template <class MmaType, class QueryTile, int kMTiles, bool kInRegisters>
struct QueryFragments;

template <class MmaType, class QueryTile, int kMTiles>
struct QueryFragments<MmaType, QueryTile, kMTiles, false> {
  static constexpr bool kInRegisters = false;
  typename MmaType::Base base;

  FKL_DEVICE void bind(uint32_t query, int first_row, int lane) {
    base = MmaType::template a_base<QueryTile>(query + static_cast<uint32_t>(first_row * QueryTile::kRowBytes), lane);
  }
  FKL_DEVICE void load() {}
  FKL_DEVICE void get(typename MmaType::FragmentA (&a)[kMTiles], int k_step) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) MmaType::template load_a<QueryTile>(a[m], base, 16 * m, k_step);
  }
};

template <class MmaType, class QueryTile, int kMTiles>
struct QueryFragments<MmaType, QueryTile, kMTiles, true> {
  static constexpr bool kInRegisters = true;
  static constexpr int kSteps = QueryTile::kColumns / MmaType::kK;
  typename MmaType::Base base;
  typename MmaType::FragmentA fragment[kSteps][kMTiles];

  FKL_DEVICE void bind(uint32_t query, int first_row, int lane) {
    base = MmaType::template a_base<QueryTile>(query + static_cast<uint32_t>(first_row * QueryTile::kRowBytes), lane);
  }
  FKL_DEVICE void load() {
#pragma unroll
    for (int k_step = 0; k_step < kSteps; ++k_step) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) MmaType::template load_a<QueryTile>(fragment[k_step][m], base, 16 * m, k_step);
    }
  }
  FKL_DEVICE void get(typename MmaType::FragmentA (&a)[kMTiles], int k_step) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) a[m] = fragment[k_step][m];
  }
};

// acc = Q K^T.
template <class MmaType, class QueryTile, class KeyTile, int kMTiles, int kTiles, class Query>
FKL_DEVICE void multiply_query_key(float (&acc)[kMTiles][kTiles][4], const Query& query,
                                   typename MmaType::Base key_base) {
  clear_accumulators(acc);
  constexpr int kSteps = QueryTile::kColumns / MmaType::kK;
  // At full accuracy the body is long: unrolled in part it compiles in half the time.
#pragma unroll(MmaType::kLimitsLoads && !Query::kInRegisters ? 8 : kSteps)
  for (int k_step = 0; k_step < kSteps; ++k_step) {
    typename MmaType::FragmentA a[kMTiles];
    query.get(a, k_step);
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      typename MmaType::FragmentB b[2];
      MmaType::template load_b_pair<KeyTile>(b, key_base, 16 * pair, k_step);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        MmaType::multiply(acc[m][2 * pair], a[m], b[0]);
        MmaType::multiply(acc[m][2 * pair + 1], a[m], b[1]);
      }
    }
  }
}

// P as the left operand.
template <class MmaType, int kMTiles, int kScoreTiles, int kSteps>
FKL_DEVICE void probs_to_fragments(typename MmaType::FragmentA (&probs)[kMTiles][kSteps],
                                   const float (&acc_s)[kMTiles][kScoreTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int k_step = 0; k_step < kSteps; ++k_step) MmaType::a_from_accumulators(probs[m][k_step], acc_s[m], k_step);
  }
}

// acc += P V.
template <class MmaType, class ValueTile, int kMTiles, int kSteps, int kTiles, class TransBase>
FKL_DEVICE void multiply_probs_value(float (&acc)[kMTiles][kTiles][4],
                                     const typename MmaType::FragmentA (&probs)[kMTiles][kSteps],
                                     TransBase value_base) {
#pragma unroll
  for (int k_step = 0; k_step < kSteps; ++k_step) {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if constexpr (MmaType::kLimitsLoads) __syncwarp();
      typename MmaType::FragmentB b[2];
      MmaType::template load_b_pair_trans<ValueTile>(b, value_base, 16 * pair, k_step);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        MmaType::multiply(acc[m][2 * pair], probs[m][k_step], b[0]);
        MmaType::multiply(acc[m][2 * pair + 1], probs[m][k_step], b[1]);
      }
    }
  }
}

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void forward_sm80(const ForwardParams& params) {
  using Shape = ForwardShape<Config>;
  using Element = typename Config::Element;
  using MmaType = Mma<Element, Config::kFullPrecision>;
  using Scores = ForwardScores<Config, ScoreMod, MaskMod>;
  using Mask = typename Scores::Mask;
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile, kThreads = Shape::kThreads;
  constexpr int kMTiles = Shape::kMTiles, kNumStages = Shape::kNumStages;
  // Keys that only lengths make dead are zero in shared memory: no value of theirs can be poisoned.
  constexpr bool kGuardsValues = !Mask::kIsBoundsOnly;
  using Poisoned = PoisonedValues<ValueTile, kThreads>;

  alignas(kSharedAlignment) extern __shared__ unsigned char forward_shared[];
  const uint32_t shared = shared_address(forward_shared);
  const CommonParams& common = params.common;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_index(), lane = lane_index();
  const QueryTileIndex block = QueryTileOrder<Element>(common, kQTile).at(block_index());
  const OuterIndex outer = outer_index(common, block.outer);
  const int head = block.head, kv_head = head / (common.num_q_heads / common.num_kv_heads);
  const int q_first = block.tile * kQTile;
  const int warp_row = warp * 16 * kMTiles;  // in the tile

  using Walk = TileWalk<Mask, kQTile, kKvTile, true>;
  struct State {
    Scores scores;
    const Element *key, *value;
  };
  static_assert(sizeof(State) <= Shape::kMaxStateBytes && sizeof(Walk) <= Shape::kMaxWalkBytes, "");
  State& block_state = *reinterpret_cast<State*>(forward_shared + Shape::kState);
  Scores& scores = block_state.scores;
  if (warp == 0) {
    scores.bind(common, outer, head);
    block_state.key = at_outer<const Element>(common.key, outer, kv_head);
    block_state.value = at_outer<const Element>(common.value, outer, kv_head);
  }
  __syncthreads();
  const int q_end = scores.mask.q_end(), kv_end = scores.mask.kv_end();

  OnlineSoftmax<kMTiles> softmax;
  softmax.clear();
  float acc_o[kMTiles][Config::kValueHeadDim / 8][4];
  clear_accumulators(acc_o);

  // Rows beyond q_end are not asked about: they must not make tiles mixed.
  Walk& walk_state = *reinterpret_cast<Walk*>(forward_shared + Shape::kWalk + warp * Shape::kMaxWalkBytes);
  int tile = 0, state = kTileDead;
  Walk first_walk(scores.mask, q_first, min_int(q_first + kQTile, q_end) - 1, 0, ceil_div(common.kv_seq_len, kKvTile));
  bool has_tile = first_walk.next(scores.mask, &tile, &state);
  walk_state = first_walk;
  if (has_tile) {
    const TileCopy<QueryTile, Config::kAligned, kThreads> query_copy(at_outer<const Element>(common.query, outer, head),
                                                                     common.query.row_stride, common.head_dim, thread);
    query_copy.copy(shared, q_first, q_end);
    // Made anew for every tile: a few instructions instead of eight registers.
    const auto copy_key = [&](int key_tile, uint32_t to_stage) {
      const TileCopy<KeyTile, Config::kAligned, kThreads> copy(block_state.key, common.key.row_stride, common.head_dim,
                                                               hidden(thread));
      copy.copy(shared + Shape::kKey + to_stage * KeyTile::kBytes, key_tile * kKvTile, kv_end);
    };
    const auto copy_value = [&](int key_tile, uint32_t to_stage) {
      const TileCopy<ValueTile, Config::kAligned, kThreads> copy(block_state.value, common.value.row_stride,
                                                                 common.value_head_dim, hidden(thread));
      copy.copy(shared + Shape::kValue + to_stage * ValueTile::kBytes, key_tile * kKvTile, kv_end);
    };
    copy_key(tile, 0);
    if (kNumStages > 1) copy_value(tile, 0);
    cp_async_commit();

    QueryFragments<MmaType, QueryTile, kMTiles, Config::kQueryInRegisters> query;
    query.bind(shared, warp_row, lane);
    if constexpr (Config::kQueryInRegisters) {
      cp_async_wait<0>();
      __syncthreads();
      query.load();
    }
    uint32_t stage = 0;
    const auto key_base = MmaType::template b_base<KeyTile>(shared + Shape::kKey, lane);
    const auto value_base = MmaType::template b_trans_base<ValueTile>(shared + Shape::kValue, lane);

    while (has_tile) {
      const int kv_first = tile * kKvTile;
      const bool is_mixed = state == kTileMixed;
      cp_async_wait<0>();
      __syncthreads();  // this tile is here, and nobody reads the one before
      if constexpr (kNumStages == 1) {
        copy_value(kv_first / kKvTile, 0);
        cp_async_commit();
      }
      Walk walk = walk_state;
      __syncwarp();  // every lane has read it
      has_tile = walk.next(scores.mask, &tile, &state);
      walk_state = walk;  // all lanes the same
      if (kNumStages == 2 && has_tile) {
        copy_key(tile, stage ^ 1);
        copy_value(tile, stage ^ 1);
        cp_async_commit();
      }

      float acc_s[kMTiles][kKvTile / 8][4];
      multiply_query_key<MmaType, QueryTile, KeyTile>(acc_s, query, MmaType::moved(key_base, stage * KeyTile::kBytes));
      const auto row_of = [&](int m, int half) {
        return scores.clip_row(q_first + warp_row + 16 * m + 8 * half + lane / 4);
      };
      const int kv_lane = kv_first + 2 * (lane % 4);
      if (is_mixed) {
        scores.template apply<true>(acc_s, row_of, kv_lane);
      } else {
        scores.template apply<false>(acc_s, row_of, kv_lane);
      }
      if constexpr (kNumStages == 1) {
        cp_async_wait<0>();
        __syncthreads();  // V is here, and nobody reads K
        if (has_tile) {
          copy_key(tile, 0);
          cp_async_commit();
        }
      }
      softmax.update(acc_s, acc_o, scores.to_log2);
      typename MmaType::FragmentA probs[kMTiles][kKvTile / MmaType::kK];
      probs_to_fragments<MmaType>(probs, acc_s);
      if constexpr (kGuardsValues) {
        const uint32_t value_tile = shared + Shape::kValue + stage * ValueTile::kBytes;
        if (is_mixed && __syncthreads_or(Poisoned::find(value_tile, thread))) {
          const uint32_t cleared = Poisoned::clear(value_tile, warp, Shape::kNumWarps, lane);
          if (lane == 0) store_shared_u32(shared + Shape::kCleared + 4 * static_cast<uint32_t>(warp), cleared);
          __syncthreads();
          for (int w = 0; w < Shape::kNumWarps; ++w) {
            uint32_t rows = load_shared_u32(shared + Shape::kCleared + 4 * static_cast<uint32_t>(w));
            for (; rows != 0; rows &= rows - 1) {
              const int key = w + (__ffs(static_cast<int>(rows)) - 1) * Shape::kNumWarps;
              Poisoned::template add<MmaType>(acc_o, probs, key,
                                              block_state.value + (kv_first + key) * common.value.row_stride,
                                              common.value_head_dim, lane);
            }
          }
        }
      }
      multiply_probs_value<MmaType, ValueTile>(acc_o, probs, MmaType::moved(value_base, stage * ValueTile::kBytes));
      if (kNumStages == 2) stage ^= 1;
    }
  }

  softmax.finish();
  // Found once more: everything that is not needed in the loop should not occupy registers there.
  const QueryTileIndex end_block = QueryTileOrder<Element>(common, kQTile).at(block_index());
  const OuterIndex end_outer = outer_index(common, end_block.outer);
  float sink = -infinity();
  if constexpr (Config::kHasSinks) sink = __ldg(at_outer<const float>(common.sinks, end_outer) + end_block.head);
  Element* out = at_outer<Element>(params.out, end_outer, end_block.head);
  float* lse = params.lse + (end_block.outer * common.num_q_heads + end_block.head) * common.q_seq_len;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = end_block.tile * kQTile + warp_index() * 16 * kMTiles + 16 * m + 8 * half + lane_index() / 4;
      if (q >= common.q_seq_len) continue;
      RowResult row = RowResult::of(softmax.row_max_log2[m][half], softmax.row_sum[m][half], sink);
      if (q >= q_end) {
        row.is_empty = true;
        row.lse = -infinity();
      }
      Element* out_row = out + q * params.out.row_stride;
#pragma unroll
      for (int t = 0; t < Config::kValueHeadDim / 8; ++t) {
        const float x = row.is_empty ? 0.0f : acc_o[m][t][2 * half] * row.factor;
        const float y = row.is_empty ? 0.0f : acc_o[m][t][2 * half + 1] * row.factor;
        store_pair<Config::kAligned>(out_row, 8 * t + accumulator_column(lane, 0), common.value_head_dim, x, y);
      }
      if (lane % 4 == 0) lse[q] = row.lse;
    }
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_FORWARD_SM80_CUH_
