// dK and dV, and dQ by asynchronous additions: the main kernel of the backward on compute capability 9.0.
//
// A block owns kKvTile keys of one key/value head and goes through the query heads of its group and their live query
// tiles, as backward_keys_sm80 does; dK and dV stay in registers. Three warpgroups: warp 0 of the first finds the tiles
// and loads them (TMA), warps 1 and 2 add dQ to global memory (bulk reductions), the other two warpgroups compute:
//
//   S^T = K Q^T      the accumulators start from -lse / scale, so that P = exp2(factor * S)
//   dP^T = V dO^T    the accumulators start from -delta, so that dS = P * dP
//   dV += P^T dO     P^T and dS^T come straight from registers
//   dS               to shared memory, once
//   dQ = dS K        each warpgroup a part; by way of shared memory to the float accumulator
//   dK += dS^T Q
//
// Up to 128 columns a warpgroup owns 64 keys. With wider heads dK and dV do not fit: the block has 64 keys
// (kSharesKeys), each warpgroup computes the scores of half of the queries and owns half of the columns; then P goes
// through shared memory too, and dQ is added from registers, for there is no room to stage it.
//
// Starting the accumulators from the statistics bought 3 to 6 %, the second buffer of dQ 4 to 8 % (H200, 128 columns).
#ifndef FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM90_CUH_
#define FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM90_CUH_

#include "core/ptx_sm90.cuh"
#include "kernels/backward_rows_sm90.cuh"
#include "kernels/backward_scores.cuh"

namespace fkl {

// A matrix in shared memory as TMA writes it and wgmma reads it: chunks of 64 columns, one after the other, each of
// kRows rows of 128 bytes whose 16-byte units are permuted by the row's number. Columns beyond the matrix are 0.
template <int kRowsValue, int kColumnsValue>
struct ChunkedTile {
  static constexpr int kRows = kRowsValue, kColumns = kColumnsValue;
  static constexpr int kChunks = ceil_div(kColumns, 64), kChunkBytes = kRows * 128, kBytes = kChunks * kChunkBytes;
  static FKL_DEVICE uint32_t unit(int row, int unit) {
    return static_cast<uint32_t>(unit / 8 * kChunkBytes + row * 128 + ((unit % 8 ^ row % 8) << 4));
  }
};

template <int kNumber>
struct Integer {
  static constexpr int kValue = kNumber;
};

template <class Config>
struct BackwardKeysSm90Shape {
  static constexpr int kQTile = Config::kQTile, kKvTile = Config::kKvTile;
  static constexpr int kStages = Config::kNumStages;  // of Q, dO and the rows' statistics
  static constexpr int kDqueryStages = Config::kDqueryStages;
  static constexpr bool kSharesKeys = Config::kSharesKeys;
  static constexpr int kThreads = 3 * 128, kConsumers = 2 * 128;
  static constexpr int kScoreColumns = kSharesKeys ? kQTile / 2 : kQTile;  // queries of a warpgroup's scores
  // Columns of a warpgroup's dK and dV, in steps that wgmma wrappers exist for. Those beyond the head are computed from
  // whatever follows in shared memory and not stored.
  static constexpr int kWidthK = !kSharesKeys              ? key_gradient_width(Config::kHeadDim, kQTile)
                                 : Config::kHeadDim <= 128 ? 64
                                                           : 128;
  static constexpr int kWidthV = !kSharesKeys                   ? value_gradient_width(Config::kValueHeadDim)
                                 : Config::kValueHeadDim <= 128 ? 64
                                                                : 128;
  static_assert(kKvTile == (kSharesKeys ? 64 : 128), "64 keys per warpgroup or 64 for both");
  static_assert(kQTile == 64 || (kQTile == 128 && !kSharesKeys && kWidthK == 64),
                "dQ is divided by rows or by columns");

  using KeyTile = ChunkedTile<kKvTile, Config::kHeadDim>;
  using ValueTile = ChunkedTile<kKvTile, Config::kValueHeadDim>;
  using QueryTile = ChunkedTile<kQTile, Config::kHeadDim>;
  using DoutTile = ChunkedTile<kQTile, Config::kValueHeadDim>;
  using ScoreTile = ChunkedTile<kQTile, kKvTile>;
  // Rows of the accumulator tile that a warpgroup adds, as a part of contiguous floats.
  static constexpr int kDqueryBytes = kSharesKeys ? 0 : 64 * 64 * 4;

  // Byte offsets in shared memory.
  static constexpr int kValue = KeyTile::kBytes;
  static constexpr int kQuery = kValue + ValueTile::kBytes;
  static constexpr int kDout = kQuery + kStages * QueryTile::kBytes;
  static constexpr int kScoreStages = 2;  // or a second barrier per query tile
  static constexpr int kDscores = kDout + kStages * DoutTile::kBytes;
  static constexpr int kProbs = kDscores + kScoreStages * ScoreTile::kBytes;
  static constexpr int kDquery = kProbs + (kSharesKeys ? kScoreStages * ScoreTile::kBytes : 0);
  static constexpr int kStatistics = kDquery + 2 * kDqueryStages * kDqueryBytes;
  static constexpr int kStatisticsBytes = 2 * 4 * kQTile;  // start of S or lse_log2, start of dP
  static constexpr int kBarriers = kStatistics + kStages * kStatisticsBytes;
  static constexpr int kBlock = kBarriers + 8 * (2 + 4 * kStages);
  static constexpr int kQueryInfo = kBlock + 16;
  static constexpr int kDqueryInfo = kQueryInfo + 8 * kStages;
  static constexpr int kSharedBytes = kDqueryInfo + 8 * 2 * kDqueryStages;
};

template <class Config>
constexpr int backward_keys_sm90_shared_bytes = BackwardKeysSm90Shape<Config>::kSharedBytes;

template <class Config, class ScoreMod, class MaskMod>
struct BackwardKeysSm90 {
  using Shape = BackwardKeysSm90Shape<Config>;
  using Element = typename Config::Element;
  using Head = BackwardHead<Config, ScoreMod, MaskMod, true>;
  using Mask = typename Head::Mask;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using DoutTile = typename Shape::DoutTile;
  using ScoreTile = typename Shape::ScoreTile;
  static constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile, kStages = Shape::kStages;
  static constexpr bool kSharesKeys = Shape::kSharesKeys, kIsPlain = Head::kIsPlain;
  static constexpr int kWidthK = Shape::kWidthK, kWidthV = Shape::kWidthV;
  static constexpr int kTiles = Shape::kScoreColumns / 8;  // of a warpgroup's scores: four per thread
  // Rows that attend to nothing exist, and what is in them may be anything.
  static constexpr bool kHasDeadRows = !Mask::kIsTrivial || !kIsPlain;
  // What finds the tiles needs registers of its own, unless it only looks at the ends.
  static constexpr int kConsumerRegisters = Mask::kIsBoundsOnly ? 240 : 232;
  static constexpr int kOtherRegisters = Mask::kIsBoundsOnly ? 24 : 40;

  enum Map { kQueryMap, kKeyMap, kValueMap, kDoutMap };                // in the order of the plan's tensor_maps
  enum NamedBarrier { kBoth = 1, kDqueryFull = 2, kDqueryEmpty = 6 };  // + warpgroup + 2 * stage
  enum TileInfo { kIsMixed = 1, kHasMarkedRows = 2, kTileUnit = 4, kEnd = -1 };

  uint32_t shared;

  FKL_DEVICE uint32_t query(int stage) const { return shared + Shape::kQuery + stage * QueryTile::kBytes; }
  FKL_DEVICE uint32_t dout(int stage) const { return shared + Shape::kDout + stage * DoutTile::kBytes; }
  FKL_DEVICE uint32_t statistics(int stage) const {
    return shared + Shape::kStatistics + stage * Shape::kStatisticsBytes;
  }
  FKL_DEVICE uint32_t dquery(int slot) const { return shared + Shape::kDquery + slot * Shape::kDqueryBytes; }
  FKL_DEVICE uint32_t barrier(int i) const { return shared + Shape::kBarriers + 8 * i; }
  FKL_DEVICE uint32_t key_full() const { return barrier(0); }
  FKL_DEVICE uint32_t value_full() const { return barrier(1); }
  FKL_DEVICE uint32_t query_full(int stage) const { return barrier(2 + stage); }
  FKL_DEVICE uint32_t query_empty(int stage) const { return barrier(2 + kStages + stage); }
  FKL_DEVICE uint32_t dout_full(int stage) const { return barrier(2 + 2 * kStages + stage); }
  FKL_DEVICE uint32_t dout_empty(int stage) const { return barrier(2 + 3 * kStages + stage); }
  // Two words: tile and state, member of the group.
  FKL_DEVICE uint32_t query_info(int stage) const { return shared + Shape::kQueryInfo + 8 * stage; }
  FKL_DEVICE uint32_t dquery_info(int slot) const { return shared + Shape::kDqueryInfo + 8 * slot; }

  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    FKL_DEVICE void advance() {
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  // What the block owns: found once, read again wherever it is needed.
  FKL_DEVICE void find_block(const CommonParams& common) const {
    constexpr int kBytesPerRow = Config::kHeadDim * static_cast<int>(sizeof(Element) + 4) +
                                 Config::kValueHeadDim * static_cast<int>(sizeof(Element));
    const KeyBlock block =
        KeyBlock::of(common, blockIdx.x, ceil_div(common.kv_seq_len, kKvTile), kBytesPerRow, Config::kSectionMegabytes);
    store_shared_16(shared + Shape::kBlock,
                    Chunk16{{static_cast<uint32_t>(block.tile), static_cast<uint32_t>(block.kv_head),
                             static_cast<uint32_t>(block.outer), 0}});
  }
  FKL_DEVICE KeyBlock this_block() const {
    const Chunk16 block = load_shared_16(shared + Shape::kBlock);
    return {static_cast<int>(block.word[0]), static_cast<int>(block.word[1]), static_cast<long long>(block.word[2])};
  }

  FKL_DEVICE void init_barriers() const {
    mbarrier_init(key_full(), 1);
    mbarrier_init(value_full(), 1);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(query_full(stage), 1);
      mbarrier_init(dout_full(stage), 1);
      mbarrier_init(query_empty(stage), 2);
      mbarrier_init(dout_empty(stage), 2);
    }
    mbarrier_init_fence();
  }

  // ---- The warp that loads.

  template <class Tile>
  static FKL_DEVICE void load_tile(uint32_t tile, const TensorMap& map, uint32_t barrier, int row, int head,
                                   int outer) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk)
      tma_load_4d(tile + chunk * Tile::kChunkBytes, &map, barrier, 64 * chunk, head, row, outer);
  }

  FKL_DEVICE void produce(const BackwardParams& params) const {
    const CommonParams& common = params.common;
    const KeyBlock block = this_block();
    const OuterIndex outer = outer_index(common, block.outer);
    const int kv_first = block.tile * kKvTile, group = common.num_q_heads / common.num_kv_heads;
    const auto load_keys = [&] {
      mbarrier_arrive_expect_bytes(key_full(), KeyTile::kBytes);
      load_tile<KeyTile>(shared, params.maps.map[kKeyMap], key_full(), kv_first, block.kv_head,
                         map_outer(params.maps, kKeyMap, outer));
      mbarrier_arrive_expect_bytes(value_full(), ValueTile::kBytes);
      load_tile<ValueTile>(shared + Shape::kValue, params.maps.map[kValueMap], value_full(), kv_first, block.kv_head,
                           map_outer(params.maps, kValueMap, outer));
    };
    // At once, unless that would load keys that are padding.
    bool has_keys = !Config::kHasKvLengths;
    if (has_keys && elect_one()) load_keys();
    Ring ring;
    for (int member = 0; member < group; ++member) {
      const int q_head = block.kv_head * group + member;
      Mask mask;
      mask.bind(common, outer, q_head);
      TileWalk<Mask, kQTile, kKvTile, false> walk(mask, kv_first, kv_first + kKvTile - 1, 0,
                                                  ceil_div(common.q_seq_len, kQTile));
      int tile, state;
      while (walk.next(mask, &tile, &state)) {
        const int s = ring.stage;
        int info = tile * kTileUnit + (state == kTileMixed ? kIsMixed : 0);
        if (kHasDeadRows && *marked_tile(params, block.outer, q_head, tile, kQTile) != 0) info += kHasMarkedRows;
        mbarrier_wait(query_empty(s), ring.parity ^ 1);
        if (elect_one()) {
          if (!has_keys) load_keys();
          store_shared_8(query_info(s), static_cast<uint32_t>(info), static_cast<uint32_t>(member));
          mbarrier_arrive_expect_bytes(query_full(s), QueryTile::kBytes + Shape::kStatisticsBytes);
          load_tile<QueryTile>(query(s), params.maps.map[kQueryMap], query_full(s), tile * kQTile, q_head,
                               map_outer(params.maps, kQueryMap, outer));
          const long long row = padded_row(params, block.outer, q_head) + tile * kQTile;
          bulk_load(statistics(s), params.lse_log2 + row, 4 * kQTile, query_full(s));
          bulk_load(statistics(s) + 4 * kQTile, params.delta + row, 4 * kQTile, query_full(s));
        }
        mbarrier_wait(dout_empty(s), ring.parity ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_bytes(dout_full(s), DoutTile::kBytes);
          load_tile<DoutTile>(dout(s), params.maps.map[kDoutMap], dout_full(s), tile * kQTile, q_head,
                              map_outer(params.maps, kDoutMap, outer));
        }
        has_keys = true;
        ring.advance();
      }
    }
    mbarrier_wait(query_empty(ring.stage), ring.parity ^ 1);
    if (elect_one()) {
      store_shared_8(query_info(ring.stage), static_cast<uint32_t>(kEnd), 0);
      mbarrier_arrive(query_full(ring.stage));
    }
  }

  // ---- The warps that add dQ, one for each warpgroup.

  FKL_DEVICE void reduce_dquery(const BackwardParams& params, int warpgroup) const {
    const KeyBlock block = this_block();
    const int group = params.common.num_q_heads / params.common.num_kv_heads;
    constexpr int kFirst = kQTile == 128 ? kWidthK : min_int(kWidthK, 64);  // columns of a part of 64 rows
    constexpr int kSecond = kQTile == 128 ? kWidthK : kWidthK - kFirst;
    int stage = 0;
    while (true) {
      const int slot = 2 * stage + warpgroup;
      named_barrier_sync(kDqueryFull + slot, 160);
      const Chunk8 info = load_shared_8(dquery_info(slot));
      const int tile = static_cast<int>(info.word[0]);
      if (tile == kEnd) break;
      if (elect_one()) {
        const long long row = padded_row(params, block.outer, block.kv_head * group + static_cast<int>(info.word[1]));
        float* part = params.dquery_accumulator + (row + tile * kQTile) * kWidthK + warpgroup * 64 * kFirst;
        bulk_reduce_add(part, dquery(slot), 256 * (warpgroup == 0 ? kFirst : kSecond));
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
      named_barrier_arrive(kDqueryEmpty + slot, 160);
      if (++stage == Shape::kDqueryStages) stage = 0;
    }
    bulk_wait<0>();  // of every lane: whichever was elected
  }

  // ---- The warpgroups that compute.

  // -lse / factor and -delta, or 0 where the program needs the score itself.
  template <bool kIsZero>
  static FKL_DEVICE void start_scores(float (&x)[kTiles][4], uint32_t statistics) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kIsZero) {
        x[tile][0] = x[tile][1] = x[tile][2] = x[tile][3] = 0.0f;
      } else {
        const Chunk8 y = load_shared_8(statistics + 32 * tile);
        x[tile][0] = x[tile][2] = __uint_as_float(y.word[0]);
        x[tile][1] = x[tile][3] = __uint_as_float(y.word[1]);
      }
    }
  }

  // acc += A B^T: A 64 rows of keys or values, B the warpgroup's queries.
  template <class TileA, class TileB>
  static FKL_DEVICE void multiply_scores(float (&acc)[kTiles][4], uint32_t a_rows, uint32_t b_rows) {
    const uint64_t a = wgmma_descriptor(a_rows, TileA::kRows), b = wgmma_descriptor(b_rows, TileB::kRows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TileA::kColumns / 16; ++k) {
      Wgmma<Element, Shape::kScoreColumns>::template ss<0, 0>(acc, a + wgmma_k_major_offset(TileA::kRows, k),
                                                              b + wgmma_k_major_offset(TileB::kRows, k), 1);
    }
    wgmma_commit();
  }
  // acc += X^T B: X the warpgroup's P or dS in registers, B the rows of dO or Q.
  template <class TileB, int kAccTiles>
  static FKL_DEVICE void multiply_keys(float (&acc)[kAccTiles][4], const uint32_t (&x)[kTiles / 2][4],
                                       uint32_t b_tile) {
    const uint64_t b = wgmma_descriptor(b_tile, TileB::kRows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kQTile / 16; ++k)
      Wgmma<Element, 8 * kAccTiles>::template rs<1>(acc, x[k], b + wgmma_mn_major_offset(k), 1);
    wgmma_commit();
  }
  // The same with all of X in shared memory.
  template <class TileB, int kAccTiles>
  static FKL_DEVICE void multiply_keys(float (&acc)[kAccTiles][4], uint32_t x, uint32_t b_columns) {
    const uint64_t a = wgmma_descriptor(x, kQTile), b = wgmma_descriptor(b_columns, TileB::kRows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kQTile / 16; ++k)
      Wgmma<Element, 8 * kAccTiles>::template ss<1, 1>(acc, a + wgmma_mn_major_offset(k), b + wgmma_mn_major_offset(k),
                                                       1);
    wgmma_commit();
  }
  // acc = dS K: 64 rows of dS, columns of K.
  template <int kAccTiles>
  static FKL_DEVICE void multiply_dquery(float (&acc)[kAccTiles][4], uint32_t dscores, uint32_t key_columns) {
    const uint64_t a = wgmma_descriptor(dscores, ScoreTile::kRows), b = wgmma_descriptor(key_columns, KeyTile::kRows);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKvTile / 16; ++k) {
      Wgmma<Element, 8 * kAccTiles>::template ss<0, 1>(acc, a + wgmma_k_major_offset(ScoreTile::kRows, k),
                                                       b + wgmma_mn_major_offset(k), k != 0);
    }
    wgmma_commit();
  }

  static FKL_DEVICE void pack(uint32_t (&packed)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i)
      packed[i / 4][i % 4] = Conversion<Element>::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
  }

  // The warp's P^T or dS^T, transposed; `address` is the lane's row of the tile.
  static FKL_DEVICE void store_scores(uint32_t address, const uint32_t (&packed)[kTiles / 2][4]) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k)
      stmatrix_x4_trans(address + 2048 * k, packed[k][0], packed[k][1], packed[k][2], packed[k][3]);
  }

  // S^T to P^T in mixed tiles; dead elements are selected away, and remembered.
  static FKL_DEVICE void mixed_probs(const Mask& mask, float (&s)[kTiles][4],
                                     unsigned (&live)[ceil_div(4 * kTiles, 32)], float factor, int q, int kv,
                                     unsigned poisoned) {
#pragma unroll
    for (int i = 0; i < ceil_div(4 * kTiles, 32); ++i) live[i] = 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row_q = q + 8 * tile + column;
        const auto row = mask.bind_row(row_q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 2 * half + column;
          const bool is_live = mask.live(row, row_q, kv + 8 * half);
          const float p = (poisoned >> (8 * half)) & 1u ? not_a_number() : exp2_approx(s[tile][i] * factor);
          s[tile][i] = is_live ? p : 0.0f;
          live[tile / 8] |= is_live ? 1u << (4 * tile + i) % 32 : 0u;
        }
      }
    }
  }

  // With a program or a bias: S^T and dP^T - delta to P^T and dS^T.
  template <bool kMixed>
  static FKL_DEVICE void score_gradients(Head& head, float (&s)[kTiles][4], float (&dp)[kTiles][4], uint32_t lse_log2,
                                         int q, int kv, unsigned poisoned, int lane) {
    float dbias_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Chunk8 lse = load_shared_8(lse_log2 + 32 * tile);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row_q = q + 8 * tile + column;
        const auto row = head.template bind_row<kMixed>(row_q);
        typename ScoreMod::RowGrads row_grads{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          head.template element<kMixed>(row, row_q, kv + 8 * half, (poisoned >> (8 * half)) & 1u,
                                        __uint_as_float(lse.word[column]), s[tile][2 * half + column],
                                        dp[tile][2 * half + column], row_grads);
        }
        head.template flush_row<28>(row, row_grads);
        head.add_dbias(row_q, kv, dp[tile][column], dp[tile][2 + column], lane, dbias_sum);
      }
    }
    head.flush_dbias(kv, lane, dbias_sum);
  }

  // The same for a live tile by the program's cheap form, if that does. A derivative that is the same for all scores of
  // a key leaves S^T for P^T and is returned in `slope`, so that dP^T may still be under way; else dS^T is made as
  // well.
  template <class Runs>
  static FKL_DEVICE bool cheap_form_does(const Runs& runs, RunGuard guard, const float (&s)[kTiles][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) runs.look(i % 4 / 2, s[i / 4][i % 4], i / 4 * 8 + i % 2, guard);
    return !__any_sync(0xffffffffu, guard.is_tripped());
  }
  template <class Runs>
  static FKL_DEVICE void cheap_probs(const Runs& runs, float (&s)[kTiles][4], float (&slope)[2], uint32_t lse_log2) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Chunk8 lse = load_shared_8(lse_log2 + 32 * tile);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[tile][i] = runs.prob(i / 2, s[tile][i], 8 * tile + i % 2, __uint_as_float(lse.word[i % 2]), &slope[i / 2]);
    }
  }
  template <class Runs>
  static FKL_DEVICE void cheap_gradients(Runs& runs, const float (&s)[kTiles][4], const float (&dp)[kTiles][4],
                                         uint32_t (&probs)[kTiles / 2][4], uint32_t (&dscores)[kTiles / 2][4],
                                         uint32_t lse_log2, unsigned zero) {
    constexpr int kAhead = 3;
    runs.follow(s[0][0], zero);  // or the compiler keeps what it looked at in registers
    float last[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile >= kAhead) runs.follow(last[tile - kAhead], zero);
      const Chunk8 lse = load_shared_8(lse_log2 + 32 * tile);
      float p[4], ds[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float slope;
        p[i] = runs.prob(i / 2, s[tile][i], 8 * tile + i % 2, __uint_as_float(lse.word[i % 2]), &slope);
        ds[i] = p[i] * slope * dp[tile][i];
      }
      last[tile] = p[3];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        probs[tile / 2][tile % 2 * 2 + half] = Conversion<Element>::pack(p[2 * half], p[2 * half + 1]);
        dscores[tile / 2][tile % 2 * 2 + half] = Conversion<Element>::pack(ds[2 * half], ds[2 * half + 1]);
      }
    }
  }

  // Rows that are marked (backward_rows_sm90.cuh) become 0, in both tiles; all consumer warps come.
  FKL_DEVICE void clear_marked_rows(int stage, int warp, int lane) const {
    for (int row = warp; row < kQTile; row += 8) {
      const float start = load_shared_f32(statistics(stage) + 4 * row);
      const float delta = load_shared_f32(statistics(stage) + 4 * (kQTile + row));
      if (!is_marked_row(kIsPlain ? fabsf(start) : start, delta)) continue;
      if (lane < 8 * QueryTile::kChunks)
        store_shared_16(query(stage) + QueryTile::unit(row, lane), Chunk16{{0, 0, 0, 0}});
      if (lane < 8 * DoutTile::kChunks) store_shared_16(dout(stage) + DoutTile::unit(row, lane), Chunk16{{0, 0, 0, 0}});
    }
    fence_proxy_async();
    named_barrier_sync(kBoth, Shape::kConsumers);
  }

  // Keys whose K is not finite: cleared, so that a dS of 0 does not meet them; bit r of the result is key r of the
  // warp's 16. Their live scores become NaN again.
  FKL_DEVICE unsigned clear_poisoned_keys(int first_key, int lane, bool* is_any) const {
    constexpr int kUnits = 8 * KeyTile::kChunks;
    bool found = false;
#pragma unroll 4
    for (int index = lane; index < 16 * kUnits; index += kWarpSize)
      found |=
          has_non_finite<Element>(load_shared_16(shared + KeyTile::unit(first_key + index / kUnits, index % kUnits)));
    *is_any = named_barrier_or(kBoth, Shape::kConsumers, found);
    if (!*is_any) return 0;
    unsigned poisoned = 0;
    for (int row = 0; row < 16; ++row) {
      const uint32_t address = shared + KeyTile::unit(first_key + row, lane % kUnits);
      const bool is_poisoned = __any_sync(0xffffffffu, has_non_finite<Element>(load_shared_16(address)));
      poisoned |= is_poisoned ? 1u << row : 0u;
    }
    named_barrier_sync(kBoth, Shape::kConsumers);  // with kSharesKeys two warps look at a row
    for (int row = 0; row < 16; ++row) {
      if ((poisoned >> row) & 1u)
        store_shared_16(shared + KeyTile::unit(first_key + row, lane % kUnits), Chunk16{{0, 0, 0, 0}});
    }
    fence_proxy_async();
    named_barrier_sync(kBoth, Shape::kConsumers);
    return poisoned;
  }

  // The warpgroup's part of dQ on its way to global memory.
  template <int kAccTiles>
  FKL_DEVICE void stage_dquery(const float (&dq)[kAccTiles][4], int slot, int warp, int lane) const {
    const uint32_t address = dquery(slot) + 4 * (warp * (kAccTiles / 2) * DqueryBlock::kFloats + 4 * lane);
#pragma unroll
    for (int pair = 0; pair < kAccTiles / 2; ++pair) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&left)[4] = dq[2 * pair], (&right)[4] = dq[2 * pair + 1];
        store_shared_16(address + 4 * (DqueryBlock::kFloats * pair + 128 * half),
                        Chunk16{{__float_as_uint(left[2 * half]), __float_as_uint(left[2 * half + 1]),
                                 __float_as_uint(right[2 * half]), __float_as_uint(right[2 * half + 1])}});
      }
    }
  }

  static FKL_DEVICE uint32_t pack_scaled(const float (&x)[4], int first, float factor) {
    return Conversion<Element>::pack(x[first] * factor, x[first + 1] * factor);
  }

  // 16 rows of the warp by way of its own rows of a tile in shared memory, whole units at a time.
  template <class Tile, int kAccTiles>
  static FKL_DEVICE void store_rows(const float (&acc)[kAccTiles][4], float factor, uint32_t tile, int tile_row,
                                    int first_unit, Element* data, long long row_stride, int num_rows, int num_columns,
                                    int lane) {
    constexpr int kUnits = kAccTiles, kTileUnits = 8 * Tile::kChunks;
#pragma unroll
    for (int j = 0; j < kUnits / 2; ++j) {
      const int unit = first_unit + 2 * j + lane / 16;
      if (first_unit + 2 * j >= kTileUnits) break;
      stmatrix_x4(tile + Tile::unit(tile_row + lane % 16, unit), pack_scaled(acc[2 * j], 0, factor),
                  pack_scaled(acc[2 * j], 2, factor), pack_scaled(acc[2 * j + 1], 0, factor),
                  pack_scaled(acc[2 * j + 1], 2, factor));
    }
    __syncwarp();
#pragma unroll 4
    for (int index = lane; index < 16 * kUnits; index += kWarpSize) {
      const int row = index / kUnits, unit = first_unit + index % kUnits;
      if (row < num_rows && 8 * unit < num_columns)
        store_global_16(data + row * row_stride + 8 * unit, load_shared_16(tile + Tile::unit(tile_row + row, unit)));
    }
  }

  FKL_DEVICE void consume(const BackwardParams& params, int warpgroup) const {
    const CommonParams& common = params.common;
    const int lane = lane_index(), warp = warp_index() & 3;
    const bool is_leader = (threadIdx.x & 127) == 0;
    const int key_row = (kSharesKeys ? 0 : 64 * warpgroup) + 16 * warp;  // of the warp's 16 keys in the tile
    const int split_q = kSharesKeys ? warpgroup * Shape::kScoreColumns : 0;
    const int first_unit_k = kSharesKeys ? warpgroup * (kWidthK / 8) : 0;
    const int first_unit_v = kSharesKeys ? warpgroup * (kWidthV / 8) : 0;
    const int kv_first = this_block().tile * kKvTile;
    const int group = common.num_q_heads / common.num_kv_heads;
    const int lane_kv = kv_first + key_row + lane / 4;
    float factor;
    {
      const KeyBlock block = this_block();
      factor = softmax_factor(*at_outer<const float>(common.scale, outer_index(common, block.outer)));
    }
    // The lane's row and unit in the transposed tile of dS.
    const int score_row = lane % 8 + 8 * (lane / 16);
    const uint32_t lane_scores = shared + Shape::kDscores + ScoreTile::unit(score_row, (key_row / 8) + lane / 8 % 2) +
                                 static_cast<uint32_t>(split_q * 128);

    float acc_dk[kWidthK / 8][4], acc_dv[kWidthV / 8][4];
    clear(acc_dk);
    clear(acc_dv);
    wgmma_touch(acc_dk);  // or ptxas sees zeros written while a wgmma runs and serialises all of them
    wgmma_touch(acc_dv);
    Head head;
    QueryRunHead<ScoreMod> cheap_head;
    int bound_member = -1;
    bool is_poisoned_tile = false;
    unsigned poisoned = 0;
    Ring ring;
    int score_stage = 0, dquery_stage = 0, step = 0;

#pragma unroll 1
    while (true) {
      const int stage = ring.stage;
      mbarrier_wait(query_full(stage), ring.parity);
      const Chunk8 info = load_shared_8(query_info(stage));
      const int tile_info = static_cast<int>(info.word[0]), member = static_cast<int>(info.word[1]);
      if (tile_info == kEnd) break;
      const int tile = tile_info / kTileUnit;
      if (step == 0) {
        mbarrier_wait(key_full(), 0);
        mbarrier_wait(value_full(), 0);
        if constexpr (!Mask::kIsTrivial) {
          poisoned = clear_poisoned_keys(key_row, lane, &is_poisoned_tile) >> (lane / 4);
        }
      }
      if constexpr (kHasDeadRows) {
        if (tile_info & kHasMarkedRows) {
          mbarrier_wait(dout_full(stage), ring.parity);
          clear_marked_rows(stage, 4 * warpgroup + warp, lane);
        }
      }
      const uint32_t lane_statistics = statistics(stage) + 4 * (split_q + 2 * (lane % 4));
      float s[kTiles][4], dp[kTiles][4];
      start_scores<!kIsPlain>(s, lane_statistics);
      start_scores<false>(dp, lane_statistics + 4 * kQTile);
      wgmma_touch(s);  // both, and now: no accumulator may be written while a wgmma runs
      wgmma_touch(dp);
      multiply_scores<KeyTile, QueryTile>(s, shared + (kSharesKeys ? 0 : warpgroup * 8192),
                                          query(stage) + split_q * 128);
      mbarrier_wait(dout_full(stage), ring.parity);
      multiply_scores<ValueTile, DoutTile>(dp, shared + Shape::kValue + (kSharesKeys ? 0 : warpgroup * 8192),
                                           dout(stage) + split_q * 128);
      const bool is_mixed = (tile_info & kIsMixed) != 0 || is_poisoned_tile;
      const int lane_q = tile * kQTile + split_q + 2 * (lane % 4);
      uint32_t probs[kTiles / 2][4], dscores[kTiles / 2][4];
      if constexpr (kIsPlain) {
        wgmma_wait<1>();
        wgmma_touch(s);
        unsigned live[ceil_div(4 * kTiles, 32)];
        if (is_mixed) {
          const KeyBlock block = this_block();
          Mask mask;
          mask.bind(common, outer_index(common, block.outer), block.kv_head * group + member);
          mixed_probs(mask, s, live, factor, lane_q, lane_kv, poisoned);
        } else {
#pragma unroll
          for (int i = 0; i < 4 * kTiles; ++i) s[i / 4][i % 4] = exp2_approx(s[i / 4][i % 4] * factor);
        }
        wgmma_wait<0>();
        wgmma_touch(dp);
        if (is_mixed) {
#pragma unroll
          for (int i = 0; i < 4 * kTiles; ++i) {
            const float ds = s[i / 4][i % 4] * dp[i / 4][i % 4];
            dp[i / 4][i % 4] = (live[i / 32] >> i % 32) & 1u ? ds : 0.0f;
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4 * kTiles; ++i) dp[i / 4][i % 4] *= s[i / 4][i % 4];
        }
      } else {
        const auto bind_head = [&](auto& of) {
          const KeyBlock block = this_block();
          of.bind(params, outer_index(common, block.outer), block.kv_head * group + member);
        };
        if constexpr (Head::kHasQueryRun) {
          if (member != bound_member) {
            const KeyBlock block = this_block();
            cheap_head.bind(common, outer_index(common, block.outer), block.kv_head * group + member, lane_kv);
            bound_member = member;
          }
          RunGuard guard;
          auto runs = QueryRuns<ScoreMod>::bind(cheap_head, lane_q, 8 * kTiles - 7, guard);
          wgmma_wait<1>();
          wgmma_touch(s);
          const bool is_cheap = !is_mixed && cheap_form_does(runs, guard, s);
          float slope[2];
          if constexpr (ScoreMod::kHasConstantSlope) {
            if (is_cheap) cheap_probs(runs, s, slope, lane_statistics);
          }
          wgmma_wait<0>();
          wgmma_touch(dp);
          if (!is_cheap) {
            Head here;
            bind_head(here);
            score_gradients<true>(here, s, dp, lane_statistics, lane_q, lane_kv, poisoned, lane);
            pack(probs, s);
            pack(dscores, dp);
          } else if constexpr (ScoreMod::kHasConstantSlope) {
            pack(probs, s);
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) dp[i / 4][i % 4] *= s[i / 4][i % 4] * slope[i % 4 / 2];
            pack(dscores, dp);
          } else {
            cheap_gradients(runs, s, dp, probs, dscores, lane_statistics,
                            static_cast<unsigned>(params.padded_q_rows) % kQTile);  // 0, which only the host knows
          }
        } else {
          if (member != bound_member) {
            if (bound_member >= 0) head.flush_head();
            bind_head(head);
            bound_member = member;
          }
          wgmma_wait<0>();
          wgmma_touch(s);
          wgmma_touch(dp);
          if (is_mixed) {
            score_gradients<true>(head, s, dp, lane_statistics, lane_q, lane_kv, poisoned, lane);
          } else {
            score_gradients<false>(head, s, dp, lane_statistics, lane_q, lane_kv, 0, lane);
          }
        }
      }
      if constexpr (!Head::kHasQueryRun) {
        pack(probs, s);
        pack(dscores, dp);
      }
      const uint32_t score_offset = score_stage * ScoreTile::kBytes;
      store_scores(lane_scores + score_offset, dscores);
      if constexpr (kSharesKeys) store_scores(lane_scores + (Shape::kProbs - Shape::kDscores) + score_offset, probs);
      fence_proxy_async();
      if constexpr (!kSharesKeys) multiply_keys<DoutTile>(acc_dv, probs, dout(stage));
      named_barrier_sync(kBoth, Shape::kConsumers);
      const uint32_t score_tile = shared + Shape::kDscores + score_offset;
      if constexpr (kSharesKeys) {
        multiply_keys<DoutTile>(acc_dv, score_tile + (Shape::kProbs - Shape::kDscores),
                                dout(stage) + first_unit_v / 8 * DoutTile::kChunkBytes);
        float dq[kWidthK / 8][4];
        multiply_dquery(dq, score_tile, shared + first_unit_k / 8 * KeyTile::kChunkBytes);
        wgmma_wait<1>();
        wgmma_touch(acc_dv);
        if (is_leader) mbarrier_arrive(dout_empty(stage));
        multiply_keys<QueryTile>(acc_dk, score_tile, query(stage) + first_unit_k / 8 * QueryTile::kChunkBytes);
        wgmma_wait<1>();
        wgmma_touch(dq);
        add_dquery(params, dq, member, tile, first_unit_k / 2, warp, lane);
      } else {
        const auto dquery_of = [&](auto tiles, uint32_t dscore_rows, uint32_t key_columns) {
          float dq[decltype(tiles)::kValue][4];
          multiply_dquery(dq, dscore_rows, key_columns);
          wgmma_wait<1>();
          wgmma_touch(acc_dv);
          if (is_leader) mbarrier_arrive(dout_empty(stage));
          multiply_keys<QueryTile>(acc_dk, dscores, query(stage));
          wgmma_wait<1>();
          wgmma_touch(dq);
          const int slot = 2 * dquery_stage + warpgroup;
          if (step >= Shape::kDqueryStages) named_barrier_sync(kDqueryEmpty + slot, 160);
          stage_dquery(dq, slot, warp, lane);
          if (is_leader) store_shared_8(dquery_info(slot), static_cast<uint32_t>(tile), static_cast<uint32_t>(member));
          fence_proxy_async();
          named_barrier_arrive(kDqueryFull + slot, 160);
        };
        if constexpr (kQTile == 128) {
          dquery_of(Integer<kWidthK / 8>{}, score_tile + warpgroup * 8192, shared);
        } else if constexpr (kWidthK == 128) {
          dquery_of(Integer<8>{}, score_tile, shared + warpgroup * KeyTile::kChunkBytes);
        } else if (warpgroup == 0) {
          dquery_of(Integer<8>{}, score_tile, shared);
        } else {
          dquery_of(Integer<(kWidthK - 64) / 8>{}, score_tile, shared + KeyTile::kChunkBytes);
        }
        if (++dquery_stage == Shape::kDqueryStages) dquery_stage = 0;
      }
      wgmma_wait<0>();
      wgmma_touch(acc_dk);
      if (is_leader) mbarrier_arrive(query_empty(stage));
      ring.advance();
      score_stage ^= 1;
      ++step;
    }
    if (step == 0 && !Config::kHasKvLengths) {  // no block ends with its loads under way
      mbarrier_wait(key_full(), 0);
      mbarrier_wait(value_full(), 0);
    }
    if constexpr (!kIsPlain && !Head::kHasQueryRun) {
      if (bound_member >= 0) head.flush_head();
    }
    if constexpr (!kSharesKeys) {
      const int end_slot = 2 * dquery_stage + warpgroup;
      for (int i = min_int(step, Shape::kDqueryStages); i > 0; --i) {
        const int back = (dquery_stage + Shape::kDqueryStages - i) % Shape::kDqueryStages;
        named_barrier_sync(kDqueryEmpty + 2 * back + warpgroup, 160);
      }
      if (is_leader) store_shared_8(dquery_info(end_slot), static_cast<uint32_t>(kEnd), 0);
      named_barrier_arrive(kDqueryFull + end_slot, 160);
    }
    // Keys and values are read by both warpgroups and become the place of dK and dV.
    named_barrier_sync(kBoth, Shape::kConsumers);
    const KeyBlock block = this_block();
    const OuterIndex outer = outer_index(common, block.outer);
    const int first = kv_first + key_row, num_rows = common.kv_seq_len - first;
    if (params.dvalue.data != nullptr) {
      store_rows<ValueTile>(acc_dv, 1.0f, shared + Shape::kValue, key_row, first_unit_v,
                            at_outer<Element>(params.dvalue, outer, block.kv_head) + first * params.dvalue.row_stride,
                            params.dvalue.row_stride, num_rows, common.value_head_dim, lane);
    }
    if (params.dkey.data != nullptr) {
      store_rows<KeyTile>(acc_dk, *at_outer<const float>(common.scale, outer), shared, key_row, first_unit_k,
                          at_outer<Element>(params.dkey, outer, block.kv_head) + first * params.dkey.row_stride,
                          params.dkey.row_stride, num_rows, common.head_dim, lane);
    }
  }

  // From registers, with kSharesKeys.
  template <int kAccTiles>
  FKL_DEVICE void add_dquery(const BackwardParams& params, const float (&dq)[kAccTiles][4], int member, int tile,
                             int first_pair, int warp, int lane) const {
    constexpr int kPairs = Config::kHeadDim / 16;
    const KeyBlock block = this_block();
    const int group = params.common.num_q_heads / params.common.num_kv_heads;
    const long long row = padded_row(params, block.outer, block.kv_head * group + member) + tile * kQTile;
    float* blocks =
        params.dquery_accumulator + row * Config::kHeadDim + (warp * kPairs + first_pair) * DqueryBlock::kFloats;
#pragma unroll
    for (int pair = 0; pair < kAccTiles / 2; ++pair) {
      if (first_pair + pair >= kPairs) break;
      DqueryBlock::add(blocks + DqueryBlock::kFloats * pair, lane, dq[2 * pair], dq[2 * pair + 1]);
    }
  }
};

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void backward_keys_sm90(const BackwardParams& params) {
  using Kernel = BackwardKeysSm90<Config, ScoreMod, MaskMod>;
  alignas(1024) extern __shared__ unsigned char backward_shared_sm90[];
  const Kernel kernel{shared_address(backward_shared_sm90)};
  const int warp = warp_index();
  if (threadIdx.x == 0) kernel.init_barriers();
  if (threadIdx.x == 32) kernel.find_block(params.common);
  __syncthreads();
  if (warp < 4) {
    register_count_decrease<Kernel::kOtherRegisters>();
    if (warp == 0) {
      kernel.produce(params);
    } else if (!Kernel::kSharesKeys && warp < 3) {
      kernel.reduce_dquery(params, warp - 1);
    }
  } else {
    register_count_increase<Kernel::kConsumerRegisters>();
    kernel.consume(params, warp / 4 - 1);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM90_CUH_
