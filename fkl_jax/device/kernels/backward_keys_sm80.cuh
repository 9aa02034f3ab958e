// dK and dV, and dQ by atomic additions: the main kernel of the backward.
//
// A block owns kKvTile keys of one key/value head and goes through the query heads of its group and their live query
// tiles, so dK and dV stay in registers and need no atomics whatever the group. Per query tile, with keys as rows:
//
//   S^T = K Q^T      each warp: 16 keys x kQTile / kSplit queries
//   dP^T = V dO^T    the accumulators start from -delta
//   P^T, dS^T        in registers; dS^T also goes to shared memory
//   dV += P^T dO     16 keys per warp, A straight from registers
//   dK += dS^T Q     likewise
//   dQ += dS K       the query tile is divided among all warps; added to the float accumulator in global memory
//
// With wide heads dK and dV of 16 keys do not fit a warp's registers: kSplit = 2 or 4 warps share 16 keys, each
// computes the scores of its part of the queries and holds its part of the columns; then P^T goes through shared memory
// too, in a tile of its own or, where memory is short, in the one of dS^T before it (kSharesScoreTile).
//
// Barriers per query tile: A before its Q and dO are read (they have arrived, and everybody is done with the tile
// before), B before dS is read by other warps. One more with kSplit > 1 and a single stage.
#ifndef FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM80_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM80_CUH_

#include "kernels/backward_scores.cuh"

namespace fkl {

// How the warps share the 16 x 16 blocks of a product: of all grids of kWarps the one with the fewest blocks per warp,
// and among those the one that reads the fewest operands.
template <int kRowBlocks, int kColumnBlocks, int kWarps>
struct WarpGrid {
  static constexpr int blocks(int rows) { return ceil_div(kRowBlocks, rows) * ceil_div(kColumnBlocks, kWarps / rows); }
  static constexpr int operands(int rows) {
    return ceil_div(kRowBlocks, rows) + ceil_div(kColumnBlocks, kWarps / rows);
  }
  static constexpr int choose() {
    int best = 1;
    for (int rows = 2; rows <= kWarps; rows *= 2) {
      if (blocks(rows) < blocks(best) || (blocks(rows) == blocks(best) && operands(rows) < operands(best))) best = rows;
    }
    return best;
  }
  static constexpr int kWarpRows = choose();
  static constexpr int kRowsPerWarp = ceil_div(kRowBlocks, kWarpRows);
  static constexpr int kColumnsPerWarp = ceil_div(kColumnBlocks, kWarps / kWarpRows);
};

template <class Config>
struct BackwardKeysShape {
  using Element = typename Config::Element;
  static constexpr int kQTile = Config::kQTile, kKvTile = Config::kKvTile;
  static constexpr int kWarps = Config::kNumWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kStages = Config::kNumStages;  // of Q, dO and the rows' statistics
  static constexpr int kKeyWarps = kKvTile / 16;
  static constexpr int kSplit = kWarps / kKeyWarps;
  static constexpr bool kSharesScoreTile = Config::kSharesScoreTile;
  static constexpr int kPairsS = kQTile / kSplit / 16;  // of queries, in a warp's scores
  static constexpr int kPairsK = ceil_div(Config::kHeadDim / 16, kSplit);
  static constexpr int kPairsV = ceil_div(Config::kValueHeadDim / 16, kSplit);
  static_assert(kKvTile % 16 == 0 && kWarps % kKeyWarps == 0, "every 16 keys have the same number of warps");
  static_assert(kQTile % (16 * kSplit) == 0, "warps that share keys divide the queries");
  static_assert(kSplit > 1 || !kSharesScoreTile, "P stays in registers");
  static_assert(kSplit == 1 || (kPairsS & (kPairsS - 1)) == 0, "an XOR finds a warp's columns of P and dS");
  static_assert((kWarps & (kWarps - 1)) == 0, "WarpGrid doubles");
  static_assert(kStages == 1 || kStages == 2, "a stage is found by one bit");

  using KeyTile = TileLayout<Element, kKvTile, Config::kHeadDim>;
  using ValueTile = TileLayout<Element, kKvTile, Config::kValueHeadDim>;
  using QueryTile = TileLayout<Element, kQTile, Config::kHeadDim>;
  using DoutTile = TileLayout<Element, kQTile, Config::kValueHeadDim>;
  using ScoreTile = TileLayout<Element, kKvTile, kQTile>;  // keys are rows
  using DqueryGrid = WarpGrid<kQTile / 16, Config::kHeadDim / 16, kWarps>;

  // Byte offsets in shared memory.
  static constexpr int kValue = KeyTile::kBytes;
  static constexpr int kQuery = kValue + ValueTile::kBytes;
  static constexpr int kDout = kQuery + kStages * QueryTile::kBytes;
  static constexpr int kDscores = kDout + kStages * DoutTile::kBytes;
  static constexpr int kProbs = kDscores + (kSharesScoreTile ? 0 : ScoreTile::kBytes);
  static constexpr int kStatistics = kProbs + (kSplit > 1 || kSharesScoreTile ? ScoreTile::kBytes : 0);
  static constexpr int kStatisticsBytes = 2 * 4 * kQTile;  // lse_log2, delta
  static constexpr int kSharedBytes = kStatistics + kStages * kStatisticsBytes;
};

template <class Config>
constexpr int backward_keys_sm80_shared_bytes = BackwardKeysShape<Config>::kSharedBytes;

template <class Config, class ScoreMod, class MaskMod>
struct BackwardKeys {
  using Shape = BackwardKeysShape<Config>;
  using Element = typename Config::Element;
  using MmaType = Mma<Element, Config::kFullPrecision>;
  using Head = BackwardHead<Config, ScoreMod, MaskMod, true>;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using DoutTile = typename Shape::DoutTile;
  using ScoreTile = typename Shape::ScoreTile;
  using Grid = typename Shape::DqueryGrid;
  static constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile;
  static constexpr int kThreads = Shape::kThreads, kSplit = Shape::kSplit;
  static constexpr bool kSharesScoreTile = Config::kSharesScoreTile;
  static constexpr int kPairsS = Shape::kPairsS, kPairsK = Shape::kPairsK, kPairsV = Shape::kPairsV;
  // Rows that attend to nothing exist, and what is in them may be anything.
  static constexpr bool kHasDeadRows = !Head::Mask::kIsTrivial || !Head::kIsPlain;

  // Where a query head's rows start. The copies are made anew for every tile: their strides are kernel parameters and
  // need no registers.
  struct QueryHead {
    const Element *query, *dout;
    long long row0;  // of the statistics
    int q_end;
  };

  static FKL_DEVICE void load_queries(const BackwardParams& params, const QueryHead& head, uint32_t shared, int stage,
                                      int tile, int thread) {
    const int first = tile * kQTile;
    thread = opaque(thread);
    const TileCopy<QueryTile, Config::kAligned, kThreads> query(head.query, params.common.query.row_stride,
                                                                params.common.head_dim, thread);
    const TileCopy<DoutTile, Config::kAligned, kThreads> dout(head.dout, params.dout.row_stride,
                                                              params.common.value_head_dim, thread);
    query.copy(shared + Shape::kQuery + stage * QueryTile::kBytes, first, head.q_end);
    dout.copy(shared + Shape::kDout + stage * DoutTile::kBytes, first, head.q_end);
    const uint32_t statistics = shared + Shape::kStatistics + stage * Shape::kStatisticsBytes;
    if (thread < kQTile / 4) {
      const long long row = head.row0 + first + 4 * thread;
      cp_async_16(statistics + 16 * thread, params.lse_log2 + row, true);
      cp_async_16(statistics + 4 * kQTile + 16 * thread, params.delta + row, true);
    }
    cp_async_commit();
  }

  // Barrier A. Rows that are marked (backward_scores.cuh) become 0.
  static FKL_DEVICE void wait_for_queries(uint32_t shared, int stage, int thread) {
    cp_async_wait<0>();
    if constexpr (!kHasDeadRows) {
      __syncthreads();
    } else {
      const uint32_t statistics = shared + Shape::kStatistics + stage * Shape::kStatisticsBytes;
      bool is_marked = false;
      if (thread < kQTile / 4) {  // the thread's own copies, so before the barrier
        const Chunk16 lse = load_shared_16(statistics + 16 * thread);
        const Chunk16 delta = load_shared_16(statistics + 4 * kQTile + 16 * thread);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          is_marked |= is_marked_row(__uint_as_float(lse.word[i]), __uint_as_float(delta.word[i]));
      }
      if (__syncthreads_or(is_marked)) {
        for (int row = thread / kWarpSize; row < kQTile; row += Shape::kWarps) {
          if (!is_marked_row(load_shared_f32(statistics + 4 * row), load_shared_f32(statistics + 4 * (kQTile + row))))
            continue;
          clear_row<QueryTile>(shared + Shape::kQuery + stage * QueryTile::kBytes, row, thread % 32);
          clear_row<DoutTile>(shared + Shape::kDout + stage * DoutTile::kBytes, row, thread % 32);
        }
        __syncthreads();
      }
    }
  }

  // Keys whose K is not finite: cleared, so that a dS of 0 does not meet them; bit r of the result is key r of the
  // warp's
  // 16. Their live scores become NaN again (BackwardHead::element).
  static FKL_DEVICE unsigned clear_poisoned_keys(uint32_t shared, int first_key, int lane, bool* is_any) {
    unsigned poisoned = 0;
    for (int r = 0; r < 16; ++r) {
      if (row_has_non_finite<KeyTile>(shared, first_key + r, lane)) poisoned |= 1u << r;
    }
    *is_any = __syncthreads_or(poisoned != 0) != 0;
    if (*is_any) {
      for (int r = 0; r < 16; ++r) {
        if ((poisoned >> r) & 1u) clear_row<KeyTile>(shared, first_key + r, lane);
      }
      __syncthreads();
    }
    return poisoned;
  }

  // The warp's S^T and dP^T - delta become P^T and dS^T. `q` and `kv`: of the lane's first accumulator.
  template <bool kIsMixed>
  static FKL_DEVICE void score_gradients(Head& head, float (&acc_s)[2 * kPairsS][4], float (&acc_dp)[2 * kPairsS][4],
                                         uint32_t lse_log2, int q, int kv, unsigned poisoned, int lane) {
    float dbias_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int tile = 0; tile < 2 * kPairsS; ++tile) {
      const Chunk8 lse = load_shared_8(lse_log2 + 32 * tile);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row_q = q + 8 * tile + column;
        const auto row = head.template bind_row<kIsMixed>(row_q);
        typename ScoreMod::RowGrads row_grads{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          head.template element<kIsMixed>(row, row_q, kv + 8 * half, (poisoned >> (8 * half)) & 1u,
                                          __uint_as_float(lse.word[column]), acc_s[tile][2 * half + column],
                                          acc_dp[tile][2 * half + column], row_grads);
        }
        head.template flush_row<28>(row, row_grads);
        head.add_dbias(row_q, kv, acc_dp[tile][column], acc_dp[tile][2 + column], lane, dbias_sum);
      }
    }
    head.flush_dbias(kv, lane, dbias_sum);
  }

  // The warp's P^T or dS^T to shared memory.
  static FKL_DEVICE void store_scores(uint32_t lane_address, const float (&acc)[2 * kPairsS][4]) {
    constexpr int kChunksPerTile = 8 / ScoreTile::kChunkElements;
#pragma unroll
    for (int tile = 0; tile < 2 * kPairsS; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t address = ScoreTile::advance(lane_address, 8 * half, tile * kChunksPerTile);
        if constexpr (sizeof(Element) == 4) {
          store_shared_8(address, __float_as_uint(acc[tile][2 * half]), __float_as_uint(acc[tile][2 * half + 1]));
        } else {
          store_shared_u32(address, Conversion<Element>::pack(acc[tile][2 * half], acc[tile][2 * half + 1]));
        }
      }
    }
  }

  // acc += (this warp's 16 keys of P^T or dS^T) B, all queries; B is dO or Q.
  template <class TileB, int kPairs>
  static FKL_DEVICE void accumulate(float (&acc)[2 * kPairs][4], const float (&acc_scores)[2 * kPairsS][4],
                                    uint32_t score_rows, uint32_t tile_b, int first_pair, int lane) {
    const auto b_base = MmaType::template b_trans_base<TileB>(tile_b, lane);
    const auto a_base = MmaType::template a_paired_base<ScoreTile>(score_rows, lane);
#pragma unroll
    for (int k_step = 0; k_step < kQTile / MmaType::kK; ++k_step) {
      typename MmaType::FragmentA a;
      if constexpr (kSplit == 1) {
        MmaType::a_from_accumulators(a, acc_scores, k_step);
      } else {
        MmaType::template load_a_paired<ScoreTile>(a, a_base, 0, k_step);
      }
      multiply_columns<MmaType, TileB, kPairs>(acc, a, b_base, first_pair, k_step);
    }
  }

  // This warp's blocks of dS K, added to the accumulator's tile at `dquery`.
  static FKL_DEVICE void add_dquery(float* dquery, uint32_t shared, int warp, int lane) {
    constexpr int kBlocksM = kQTile / 16, kBlocksN = Config::kHeadDim / 16;
    const int first_m = warp % Grid::kWarpRows * Grid::kRowsPerWarp;
    const int first_n = warp / Grid::kWarpRows * Grid::kColumnsPerWarp;
    if (kBlocksM % Grid::kWarpRows != 0 && first_m >= kBlocksM) return;
    if (first_n >= kBlocksN) return;
    float acc[Grid::kRowsPerWarp][2 * Grid::kColumnsPerWarp][4];
#pragma unroll
    for (int m = 0; m < Grid::kRowsPerWarp; ++m) clear(acc[m]);
    const auto a_base = MmaType::template a_trans_base<ScoreTile>(shared + Shape::kDscores, lane);
    const auto b_base = MmaType::template b_trans_base<KeyTile>(shared, lane);
#pragma unroll
    for (int k_step = 0; k_step < kKvTile / MmaType::kK; ++k_step) {
      typename MmaType::FragmentA a[Grid::kRowsPerWarp];
#pragma unroll
      for (int m = 0; m < Grid::kRowsPerWarp; ++m)
        MmaType::template load_a_trans<ScoreTile>(a[m], a_base, 16 * (first_m + m), k_step);
#pragma unroll
      for (int n = 0; n < Grid::kColumnsPerWarp; ++n) {
        if (kBlocksN % Grid::kColumnsPerWarp != 0 && first_n + n >= kBlocksN) break;
        typename MmaType::FragmentB b[2];
        MmaType::template load_b_pair_trans<KeyTile>(b, b_base, 16 * (first_n + n), k_step);
#pragma unroll
        for (int m = 0; m < Grid::kRowsPerWarp; ++m) {
          MmaType::multiply(acc[m][2 * n], a[m], b[0]);
          MmaType::multiply(acc[m][2 * n + 1], a[m], b[1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < Grid::kRowsPerWarp; ++m) {
#pragma unroll
      for (int n = 0; n < Grid::kColumnsPerWarp; ++n) {
        if (kBlocksN % Grid::kColumnsPerWarp != 0 && first_n + n >= kBlocksN) break;
        DqueryBlock::add(dquery + ((first_m + m) * kBlocksN + first_n + n) * DqueryBlock::kFloats, lane, acc[m][2 * n],
                         acc[m][2 * n + 1]);
      }
    }
  }
};

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_keys_sm80(const BackwardParams& params) {
  using Kernel = BackwardKeys<Config, ScoreMod, MaskMod>;
  using Shape = BackwardKeysShape<Config>;
  using Element = typename Config::Element;
  using MmaType = typename Kernel::MmaType;
  using Head = typename Kernel::Head;
  using KeyTile = typename Kernel::KeyTile;
  using ValueTile = typename Kernel::ValueTile;
  using QueryTile = typename Kernel::QueryTile;
  using DoutTile = typename Kernel::DoutTile;
  using ScoreTile = typename Kernel::ScoreTile;
  constexpr int kQTile = Kernel::kQTile, kKvTile = Kernel::kKvTile;
  constexpr int kPairsS = Kernel::kPairsS, kPairsK = Kernel::kPairsK, kPairsV = Kernel::kPairsV;

  alignas(kSharedAlignment) extern __shared__ unsigned char backward_shared[];
  const uint32_t shared = shared_address(backward_shared);
  const CommonParams& common = params.common;
  const int thread = static_cast<int>(threadIdx.x), warp = warp_index();
  const int key_row = warp % Shape::kKeyWarps * 16;  // of the warp's 16 keys in the tile
  const int split = warp / Shape::kKeyWarps;

  // Found anew for every head and at the end: the registers are needed in between.
  const auto this_block = [&] {
    constexpr int kBytesPerRow = Config::kHeadDim * static_cast<int>(sizeof(Element) + 4) +
                                 Config::kValueHeadDim * static_cast<int>(sizeof(Element));
    return KeyBlock::of(common, opaque(blockIdx.x), ceil_div(common.kv_seq_len, kKvTile), kBytesPerRow);
  };
  const int kv_first = this_block().tile * kKvTile;
  const int group = common.num_q_heads / common.num_kv_heads;
  const bool needs_dquery = !Config::kDeterministic && (params.dquery.data != nullptr || Config::kHasDscale);

  float acc_dk[2 * kPairsK][4], acc_dv[2 * kPairsV][4];
  clear(acc_dk);
  clear(acc_dv);
  bool has_keys = false, is_poisoned_tile = false;
  unsigned poisoned = 0;
  int stage = 0;

  for (int member = 0; member < group; ++member) {
    const KeyBlock block = this_block();
    const OuterIndex outer = outer_index(common, block.outer);
    const int q_head = block.kv_head * group + member;
    Head head;
    head.bind(params, outer, q_head);
    TileWalk<typename Head::Mask, kQTile, kKvTile, false> walk(head.mask, kv_first, kv_first + kKvTile - 1, 0,
                                                               ceil_div(common.q_seq_len, kQTile));
    int next_tile = 0, next_state = kTileDead;
    bool has_next = walk.next(head.mask, &next_tile, &next_state);
    if (!has_next) continue;

    const long long row0 = padded_row(params, block.outer, q_head);
    const typename Kernel::QueryHead rows{at_outer<const Element>(common.query, outer, q_head),
                                          at_outer<const Element>(params.dout, outer, q_head), row0, head.mask.q_end()};
    if (!has_keys) {
      has_keys = true;
      const TileCopy<KeyTile, Config::kAligned, Shape::kThreads> key(
          at_outer<const Element>(common.key, outer, block.kv_head), common.key.row_stride, common.head_dim, thread);
      const TileCopy<ValueTile, Config::kAligned, Shape::kThreads> value(
          at_outer<const Element>(common.value, outer, block.kv_head), common.value.row_stride, common.value_head_dim,
          thread);
      key.copy(shared, kv_first, head.mask.kv_end());
      value.copy(shared + Shape::kValue, kv_first, head.mask.kv_end());
      Kernel::load_queries(params, rows, shared, stage, next_tile, thread);
      if constexpr (!Head::Mask::kIsTrivial) {
        cp_async_wait<0>();
        __syncthreads();
        poisoned = Kernel::clear_poisoned_keys(shared, key_row, thread % kWarpSize, &is_poisoned_tile);
      }
    } else {
      Kernel::load_queries(params, rows, shared, stage, next_tile, thread);
    }

    while (has_next) {
      const int q_first = next_tile * kQTile;
      const bool is_mixed = next_state == kTileMixed || is_poisoned_tile;
      has_next = walk.next(head.mask, &next_tile, &next_state);
      Kernel::wait_for_queries(shared, stage, thread);
      if (Shape::kStages == 2 && has_next) Kernel::load_queries(params, rows, shared, stage ^ 1, next_tile, thread);

      const uint32_t query = shared + Shape::kQuery + stage * QueryTile::kBytes;
      const uint32_t dout = shared + Shape::kDout + stage * DoutTile::kBytes;
      const int lane = opaque(thread) % kWarpSize;
      const int split_q = split * (kQTile / Kernel::kSplit);
      const int lane_q = split_q + 2 * (lane % 4);
      const uint32_t lse_log2 = shared + Shape::kStatistics + stage * Shape::kStatisticsBytes + 4 * lane_q;

      float acc_s[2 * kPairsS][4], acc_dp[2 * kPairsS][4];
      clear(acc_s);
      multiply_rows<MmaType, KeyTile, QueryTile, kPairsS>(
          acc_s, MmaType::template a_base<KeyTile>(shared + key_row * KeyTile::kRowBytes, lane),
          MmaType::template b_base<QueryTile>(query + split_q * QueryTile::kRowBytes, lane));
#pragma unroll
      for (int tile = 0; tile < 2 * kPairsS; ++tile) {
        const Chunk8 delta = load_shared_8(lse_log2 + 4 * kQTile + 32 * tile);
        acc_dp[tile][0] = acc_dp[tile][2] = -__uint_as_float(delta.word[0]);
        acc_dp[tile][1] = acc_dp[tile][3] = -__uint_as_float(delta.word[1]);
      }
      multiply_rows<MmaType, ValueTile, DoutTile, kPairsS>(
          acc_dp, MmaType::template a_base<ValueTile>(shared + Shape::kValue + key_row * ValueTile::kRowBytes, lane),
          MmaType::template b_base<DoutTile>(dout + split_q * DoutTile::kRowBytes, lane));

      const int lane_kv = kv_first + key_row + lane / 4;
      if (is_mixed) {
        Kernel::template score_gradients<true>(head, acc_s, acc_dp, lse_log2, q_first + lane_q, lane_kv,
                                               poisoned >> (lane / 4), lane);
      } else {
        Kernel::template score_gradients<false>(head, acc_s, acc_dp, lse_log2, q_first + lane_q, lane_kv, 0, lane);
      }

      const uint32_t score_rows = shared + key_row * ScoreTile::kRowBytes;
      const uint32_t lane_scores = score_rows + static_cast<uint32_t>(ScoreTile::element_offset(lane / 4, lane_q));
      if constexpr (Kernel::kSplit > 1) {
        Kernel::store_scores(lane_scores + Shape::kProbs, acc_s);
        if constexpr (!Shape::kSharesScoreTile) Kernel::store_scores(lane_scores + Shape::kDscores, acc_dp);
        __syncthreads();  // B
      } else {
        Kernel::store_scores(lane_scores + Shape::kDscores, acc_dp);
      }
      Kernel::template accumulate<DoutTile, kPairsV>(acc_dv, acc_s, score_rows + Shape::kProbs, dout, split * kPairsV,
                                                     lane);
      if constexpr (Shape::kSharesScoreTile) {
        __syncthreads();
        Kernel::store_scores(lane_scores + Shape::kDscores, acc_dp);
        __syncthreads();
      }
      Kernel::template accumulate<QueryTile, kPairsK>(acc_dk, acc_dp, score_rows + Shape::kDscores, query,
                                                      split * kPairsK, lane);
      if constexpr (Kernel::kSplit == 1) __syncthreads();  // B
      if (Shape::kStages == 1 && Kernel::kSplit == 1 && has_next)
        Kernel::load_queries(params, rows, shared, stage, next_tile, thread);
      if (needs_dquery) {
        Kernel::add_dquery(params.dquery_accumulator + (row0 + q_first) * Config::kHeadDim, shared, warp, lane);
      }
      if constexpr (Shape::kStages == 1 && Kernel::kSplit > 1) {
        __syncthreads();
        if (has_next) Kernel::load_queries(params, rows, shared, stage, next_tile, thread);
      }
      if (Shape::kStages == 2) stage ^= 1;
    }
    head.flush_head();
  }

  const int lane = thread % kWarpSize;
  const KeyBlock block = this_block();
  const OuterIndex outer = outer_index(common, block.outer);
  if (params.dkey.data != nullptr) {
    const float scale = *at_outer<const float>(common.scale, outer);
    store_accumulators<Config::kAligned, Config::kHeadDim / 16, kPairsK>(
        at_outer<Element>(params.dkey, outer, block.kv_head), params.dkey.row_stride, kv_first + key_row,
        common.kv_seq_len, split * kPairsK, common.head_dim, lane, scale, acc_dk);
  }
  if (params.dvalue.data != nullptr) {
    store_accumulators<Config::kAligned, Config::kValueHeadDim / 16, kPairsV>(
        at_outer<Element>(params.dvalue, outer, block.kv_head), params.dvalue.row_stride, kv_first + key_row,
        common.kv_seq_len, split * kPairsV, common.value_head_dim, lane, 1.0f, acc_dv);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM80_CUH_
