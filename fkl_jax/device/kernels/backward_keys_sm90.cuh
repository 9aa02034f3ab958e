// dK and dV, and dQ by asynchronous additions: the main kernel of the backward on compute capability 9.0.
//
// A block of work is kKvTile keys of one key/value head, the query heads of its group and their live query tiles, as in
// backward_keys_sm80; dK and dV stay in registers. There are as many thread blocks as multiprocessors; each takes one
// block of work after the other from a counter. Three warpgroups: warp 0 of the first finds the tiles and loads them
// (TMA), those of the next block while the one before is finished; warps 1 and 2 add dQ to global memory (bulk
// reductions) and store dK and dV, the other two warpgroups compute:
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
// Deterministic calls add to a tile of dQ in the order of the keys: whoever adds waits for its turn, a word per tile
// and warpgroup that says which tile of keys came last.
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
  static constexpr int kWidthK = !kSharesKeys ? gradient_width(Config::kHeadDim) : Config::kHeadDim <= 128 ? 64 : 128;
  static constexpr int kWidthV = !kSharesKeys                   ? gradient_width(Config::kValueHeadDim)
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
  // dQ on its way to global memory: parts of 64 rows and at most 64 columns, one of a warpgroup. Of 64 x 64 there is
  // one. A warpgroup's dK or dV, of 16 bits and up to 128 columns, takes the same way.
  static constexpr int kNumDqueryParts = kSharesKeys ? 0 : kQTile == 64 && kWidthK == 64 ? 1 : 2;
  static constexpr int kDqueryBytes = kSharesKeys ? 0 : 64 * 64 * 4;
  using KeyRows = ChunkedTile<64, Config::kHeadDim>;
  using ValueRows = ChunkedTile<64, Config::kValueHeadDim>;
  static_assert(kSharesKeys || (KeyRows::kBytes <= kDqueryBytes && ValueRows::kBytes <= kDqueryBytes), "too wide");

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
  static constexpr int kBlocks = kBarriers + ceil_div(8 * (3 + 4 * kStages), 16) * 16;
  static_assert(kBlocks % 16 == 0, "four words are read at once");
  static constexpr int kNumBlocks = 8;  // more than can be between the warp that loads and those that store
  static constexpr int kQueryInfo = kBlocks + 16 * kNumBlocks;
  static constexpr int kPartInfo = kQueryInfo + 16 * kStages;
  static constexpr int kSharedBytes = kPartInfo + 16 * 2 * kDqueryStages;
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
  // Blocks with neighbouring keys start together and add to dQ in turns: under a causal mask they all come to a tile at
  // the same time if they begin with the last one.
  static constexpr bool kDescends = Config::kDeterministic;
  // What finds the tiles may run out of registers, for it has time; those who compute may not.
  static constexpr int kConsumerRegisters = 240, kOtherRegisters = 24;

  enum Map { kQueryMap, kKeyMap, kValueMap, kDoutMap, kDkeyMap, kDvalueMap };  // the plan's tensor_maps
  enum NamedBarrier { kBoth = 1, kPartFull = 2, kPartEmpty = 6 };              // + warpgroup + 2 * stage
  // What comes with a query tile. kIsFirst: of a block; it is also set in the numbers that stand for no tile at all.
  enum TileInfo { kIsMixed = 1, kHasMarkedRows = 2, kIsFirst = 4, kTileUnit = 8, kIsEmptyBlock = -1, kStop = -2 };
  enum PartKind { kAddDquery, kStoreDkey, kStoreDvalue, kNoMoreParts };

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
  FKL_DEVICE uint32_t keys_empty() const { return barrier(2); }
  FKL_DEVICE uint32_t query_full(int stage) const { return barrier(3 + stage); }
  FKL_DEVICE uint32_t query_empty(int stage) const { return barrier(3 + kStages + stage); }
  FKL_DEVICE uint32_t dout_full(int stage) const { return barrier(3 + 2 * kStages + stage); }
  FKL_DEVICE uint32_t dout_empty(int stage) const { return barrier(3 + 3 * kStages + stage); }
  // Four words: TileInfo, member of the group, row of the accumulator, what the turn must be.
  FKL_DEVICE uint32_t query_info(int stage) const { return shared + Shape::kQueryInfo + 16 * stage; }
  // Four words: PartKind; row of the accumulator or number of the block; what the turn must be and becomes.
  FKL_DEVICE uint32_t part_info(int slot) const { return shared + Shape::kPartInfo + 16 * slot; }
  // Four words: tile, key/value head, outer element, scale.
  FKL_DEVICE uint32_t block_info(unsigned number) const {
    return shared + Shape::kBlocks + 16 * (number % Shape::kNumBlocks);
  }
  FKL_DEVICE KeyBlock block_of(unsigned number) const {
    const Chunk16 block = load_shared_16(block_info(number));
    return {static_cast<int>(block.word[0]), static_cast<int>(block.word[1]), static_cast<long long>(block.word[2])};
  }

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

  FKL_DEVICE void init_barriers() const {
    mbarrier_init(key_full(), 1);
    mbarrier_init(value_full(), 1);
    mbarrier_init(keys_empty(), kSharesKeys ? Shape::kConsumers : 2);
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

  FKL_DEVICE void load_keys(const BackwardParams& params, const KeyBlock& block, const OuterIndex& outer) const {
    const int first = block.tile * kKvTile;
    mbarrier_arrive_expect_bytes(key_full(), KeyTile::kBytes);
    load_tile<KeyTile>(shared, params.maps.map[kKeyMap], key_full(), first, block.kv_head,
                       map_outer(params.maps, kKeyMap, outer));
    mbarrier_arrive_expect_bytes(value_full(), ValueTile::kBytes);
    load_tile<ValueTile>(shared + Shape::kValue, params.maps.map[kValueMap], value_full(), first, block.kv_head,
                         map_outer(params.maps, kValueMap, outer));
  }

  // The next block that nobody has. Blocks of deterministic calls wait for those with earlier keys, which have been
  // taken before.
  FKL_DEVICE unsigned take_block(const BackwardParams& params) const {
    unsigned index = 0;
    if (lane_index() == 0) index = static_cast<unsigned>(atomicAdd(TileScratch<Config>{params}.ticket(), 1));
    return __shfl_sync(0xffffffffu, index, 0);
  }

  FKL_DEVICE void produce(const BackwardParams& params) const {
    const CommonParams& common = params.common;
    constexpr int kBytesPerRow = Config::kHeadDim * static_cast<int>(sizeof(Element) + 4) +
                                 Config::kValueHeadDim * static_cast<int>(sizeof(Element));
    const int group = common.num_q_heads / common.num_kv_heads, num_tiles = ceil_div(common.kv_seq_len, kKvTile);
    const unsigned num_blocks = static_cast<unsigned>(num_tiles) * static_cast<unsigned>(common.num_kv_heads) *
                                static_cast<unsigned>(common.num_outer);
    const TileScratch<Config> scratch{params};
    Ring ring;
    unsigned number = 0;
    uint32_t keys_parity = 1;  // of the place of keys and values: left once by every block, also by those without tiles
    while (true) {
      const unsigned index = take_block(params);
      if (index >= num_blocks) break;
      const KeyBlock block = KeyBlock::of(common, index, num_tiles, kBytesPerRow, Config::kSectionMegabytes);
      const OuterIndex outer = outer_index(common, block.outer);
      const int kv_first = block.tile * kKvTile;
      if (elect_one()) {
        const float scale = *at_outer<const float>(common.scale, outer);
        store_shared_16(block_info(number),
                        Chunk16{{static_cast<uint32_t>(block.tile), static_cast<uint32_t>(block.kv_head),
                                 static_cast<uint32_t>(block.outer), __float_as_uint(scale)}});
      }
      ++number;
      int first_flag = kIsFirst;
      for (int member = 0; member < group; ++member) {
        const int q_head = block.kv_head * group + member;
        Mask mask;
        mask.bind(common, outer, q_head);
        TileWalk<Mask, kQTile, kKvTile, false, kDescends> walk(mask, kv_first, kv_first + kKvTile - 1, 0,
                                                               ceil_div(common.q_seq_len, kQTile));
        int tile, state;
        while (walk.next(mask, &tile, &state)) {
          const int s = ring.stage, q_first = tile * kQTile;
          int is_marked = 0, before = 0;
          if constexpr (kHasDeadRows) is_marked = *scratch.mark(block.outer, q_head, tile);
          if constexpr (Config::kDeterministic)
            before = previous_key_tile<Mask, kKvTile>(mask, q_first, q_first + kQTile - 1, block.tile);
          mbarrier_wait(query_empty(s), ring.parity ^ 1);
          if (elect_one()) {
            load_tile<QueryTile>(query(s), params.maps.map[kQueryMap], query_full(s), q_first, q_head,
                                 map_outer(params.maps, kQueryMap, outer));
            const long long row = padded_row(params, block.outer, q_head) + q_first;
            bulk_load(statistics(s), params.lse_log2 + row, 4 * kQTile, query_full(s));
            bulk_load(statistics(s) + 4 * kQTile, params.delta + row, 4 * kQTile, query_full(s));
            // Last, so that nothing waits for `is_marked`; a phase may get its bytes before they are announced.
            const int info = tile * kTileUnit + first_flag + (state == kTileMixed ? kIsMixed : 0) +
                             (is_marked != 0 ? kHasMarkedRows : 0);
            store_shared_16(query_info(s), Chunk16{{static_cast<uint32_t>(info), static_cast<uint32_t>(member),
                                                    static_cast<uint32_t>(row), static_cast<uint32_t>(before + 1)}});
            mbarrier_arrive_expect_bytes(query_full(s), QueryTile::kBytes + Shape::kStatisticsBytes);
          }
          mbarrier_wait(dout_empty(s), ring.parity ^ 1);
          if (elect_one()) {
            mbarrier_arrive_expect_bytes(dout_full(s), DoutTile::kBytes);
            load_tile<DoutTile>(dout(s), params.maps.map[kDoutMap], dout_full(s), q_first, q_head,
                                map_outer(params.maps, kDoutMap, outer));
          }
          if (first_flag != 0) {  // after the tile, which need not wait for the end of the block before
            mbarrier_wait(keys_empty(), keys_parity);
            keys_parity ^= 1;
            if (elect_one()) load_keys(params, block, outer);
            first_flag = 0;
          }
          ring.advance();
        }
      }
      if (first_flag != 0) {
        send_without_tile(ring, kIsEmptyBlock);
        mbarrier_wait(keys_empty(), keys_parity);
        keys_parity ^= 1;
        ring.advance();
      }
    }
    send_without_tile(ring, kStop);
  }

  FKL_DEVICE void send_without_tile(const Ring& ring, TileInfo info) const {
    mbarrier_wait(query_empty(ring.stage), ring.parity ^ 1);
    mbarrier_wait(dout_empty(ring.stage), ring.parity ^ 1);
    if (elect_one()) {
      store_shared_u32(query_info(ring.stage), static_cast<uint32_t>(info));
      mbarrier_arrive(query_full(ring.stage));
      mbarrier_arrive(dout_full(ring.stage));
    }
  }

  // ---- The warps that add dQ and store dK and dV, one for each warpgroup.

  template <class Rows>
  FKL_DEVICE void store_part(const BackwardParams& params, Map map, uint32_t part, unsigned number,
                             int warpgroup) const {
    const KeyBlock block = block_of(number);
    const int outer = map_outer(params.maps, map, outer_index(params.common, block.outer));
#pragma unroll
    for (int chunk = 0; chunk < Rows::kChunks; ++chunk) {
      tma_store_4d(&params.maps.map[map], part + chunk * Rows::kChunkBytes, 64 * chunk, block.kv_head,
                   block.tile * kKvTile + 64 * warpgroup, outer);
    }
  }

  FKL_DEVICE void move_parts(const BackwardParams& params, int warpgroup) const {
    constexpr int kFirst = kQTile == 128 ? kWidthK : min_int(kWidthK, 64);  // columns of a part of 64 rows
    constexpr int kSecond = kQTile == 128 ? kWidthK : kWidthK - kFirst;
    const TileScratch<Config> scratch{params};
    int stage = 0;
    while (true) {
      const int slot = 2 * stage + warpgroup;
      named_barrier_sync(kPartFull + slot, 160);
      const Chunk16 info = load_shared_16(part_info(slot));
      const int kind = static_cast<int>(info.word[0]);
      if (kind == kNoMoreParts) break;
      int* turn = nullptr;
      if (elect_one()) {
        if (kind == kAddDquery) {
          const long long row = info.word[1];
          if constexpr (Config::kDeterministic) {
            turn = scratch.turn(row / kQTile, warpgroup);
            while (load_acquire(turn) != static_cast<int>(info.word[2])) {
            }
            fence_proxy_async_global();
          }
          bulk_reduce_add(params.dquery_accumulator + row * kWidthK + warpgroup * 64 * kFirst, dquery(slot),
                          256 * (warpgroup == 0 ? kFirst : kSecond));
        } else if (kind == kStoreDkey) {
          store_part<typename Shape::KeyRows>(params, kDkeyMap, dquery(slot), info.word[1], warpgroup);
        } else {
          store_part<typename Shape::ValueRows>(params, kDvalueMap, dquery(slot), info.word[1], warpgroup);
        }
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
      named_barrier_arrive(kPartEmpty + slot, 160);
      if constexpr (Config::kDeterministic) {
        if (turn != nullptr) {
          bulk_wait<0>();
          fence_proxy_async_global();
          store_release(turn, static_cast<int>(info.word[3]));
        }
        __syncwarp();
      }
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

  // S^T to P^T in mixed tiles. Dead elements are selected away and become -0, which no live one is: exp2 has no sign.
  static FKL_DEVICE void mixed_probs(const Mask& mask, float (&s)[kTiles][4], float factor, int q, int kv,
                                     unsigned poisoned) {
    if (poisoned != 0) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) {
        if ((poisoned >> (8 * (i % 4 / 2))) & 1u) s[i / 4][i % 4] = not_a_number();
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row_q = q + 8 * tile + column;
        const auto row = mask.bind_row(row_q);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& p = s[tile][2 * half + column];
          p = mask.live(row, row_q, kv + 8 * half) ? exp2_approx(p * factor) : -0.0f;
        }
      }
    }
  }
  static FKL_DEVICE bool is_dead(float p) { return __float_as_uint(p) == 0x80000000u; }

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
    for (int tile = 0; tile < kAccTiles; ++tile) {
      store_shared_16(address + 4 * DqueryBlock::kFloats / 2 * tile,
                      Chunk16{{__float_as_uint(dq[tile][0]), __float_as_uint(dq[tile][1]), __float_as_uint(dq[tile][2]),
                               __float_as_uint(dq[tile][3])}});
    }
  }

  static FKL_DEVICE uint32_t pack_scaled(const float (&x)[4], int first, float factor) {
    return Conversion<Element>::pack(x[first] * factor, x[first + 1] * factor);
  }

  // 16 rows of the warp, rounded, to a tile in shared memory.
  template <class Tile, int kAccTiles>
  static FKL_DEVICE void pack_rows(const float (&acc)[kAccTiles][4], float factor, uint32_t tile, int tile_row,
                                   int first_unit, int lane) {
    constexpr int kTileUnits = 8 * Tile::kChunks;
#pragma unroll
    for (int j = 0; j < kAccTiles / 2; ++j) {
      const int unit = first_unit + 2 * j + lane / 16;
      if (first_unit + 2 * j >= kTileUnits) break;
      stmatrix_x4(tile + Tile::unit(tile_row + lane % 16, unit), pack_scaled(acc[2 * j], 0, factor),
                  pack_scaled(acc[2 * j], 2, factor), pack_scaled(acc[2 * j + 1], 0, factor),
                  pack_scaled(acc[2 * j + 1], 2, factor));
    }
  }

  // The same, and from there to global memory, whole units at a time.
  template <class Tile, int kAccTiles>
  static FKL_DEVICE void store_rows(const float (&acc)[kAccTiles][4], float factor, uint32_t tile, int tile_row,
                                    int first_unit, Element* data, long long row_stride, int num_rows, int num_columns,
                                    int lane) {
    constexpr int kUnits = kAccTiles;
    pack_rows<Tile>(acc, factor, tile, tile_row, first_unit, lane);
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
    const int group = common.num_q_heads / common.num_kv_heads;
    // The lane's row and unit in the transposed tile of dS.
    const int score_row = lane % 8 + 8 * (lane / 16);
    const uint32_t lane_scores = shared + Shape::kDscores + ScoreTile::unit(score_row, (key_row / 8) + lane / 8 % 2) +
                                 static_cast<uint32_t>(split_q * 128);

    // Stages and parities follow from the number of tiles, of parts and of blocks so far.
    unsigned step = 0, part = 0, number = 0;
    uint32_t keys_parity = 0;
    int tile_info = receive_tile(step);
    while (tile_info != kStop) {
      float acc_dk[kWidthK / 8][4], acc_dv[kWidthV / 8][4];
      clear(acc_dk);
      clear(acc_dv);
      wgmma_touch(acc_dk);  // or ptxas sees zeros written while a wgmma runs and serialises all of them
      wgmma_touch(acc_dv);
      Head head;
      int bound_member = -1;
      bool is_poisoned_tile = false;
      unsigned poisoned = 0;
      const int lane_kv = static_cast<int>(load_shared_u32(block_info(number))) * kKvTile + key_row + lane / 4;
      const float factor = softmax_factor(load_shared_f32(block_info(number) + 12));
      if (tile_info == kIsEmptyBlock) {
        named_barrier_sync(kBoth, Shape::kConsumers);  // all have read it
        if (is_leader) {
          mbarrier_arrive(query_empty(static_cast<int>(step % kStages)));
          mbarrier_arrive(dout_empty(static_cast<int>(step % kStages)));
        }
        tile_info = receive_tile(++step);
      } else {
        mbarrier_wait(key_full(), keys_parity);
        mbarrier_wait(value_full(), keys_parity);
        keys_parity ^= 1;
        if constexpr (!Mask::kIsTrivial) poisoned = clear_poisoned_keys(key_row, lane, &is_poisoned_tile) >> (lane / 4);
        float late_dq[kSharesKeys ? kWidthK / 16 : 1][4];
        clear(late_dq);
        wgmma_touch(late_dq);
        constexpr unsigned kNoRow = ~0u;
        unsigned late_row = kNoRow;
#pragma unroll 1
        do {
          const int stage = static_cast<int>(step % kStages);
          const uint32_t parity = step / kStages % 2;
          const int tile = tile_info / kTileUnit;
          if constexpr (kHasDeadRows) {
            if (tile_info & kHasMarkedRows) {
              mbarrier_wait(dout_full(stage), parity);
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
          mbarrier_wait(dout_full(stage), parity);
          multiply_scores<ValueTile, DoutTile>(dp, shared + Shape::kValue + (kSharesKeys ? 0 : warpgroup * 8192),
                                               dout(stage) + split_q * 128);
          if constexpr (kSharesKeys) {
            // The other half of the tile before; of the first tile: zeros.
            const unsigned row = load_shared_u32(query_info(stage) + 8);
            add_dquery(params, late_dq, late_row == kNoRow ? row : late_row, first_unit_k / 2 + kWidthK / 32, warp,
                       lane);
            late_row = row;
          }
          const bool is_mixed = (tile_info & kIsMixed) != 0 || is_poisoned_tile;
          const int lane_q = tile * kQTile + split_q + 2 * (lane % 4);
          if constexpr (kIsPlain) {
            wgmma_wait<1>();
            wgmma_touch(s);
            if (is_mixed) {
              const KeyBlock block = block_of(number);
              Mask mask;
              mask.bind(common, outer_index(common, block.outer), block.kv_head * group + member_of(stage));
              mixed_probs(mask, s, factor, lane_q, lane_kv, poisoned);
            } else {
#pragma unroll
              for (int i = 0; i < 4 * kTiles; ++i) s[i / 4][i % 4] = exp2_approx(s[i / 4][i % 4] * factor);
            }
            wgmma_wait<0>();
            wgmma_touch(dp);
            if (is_mixed) {
#pragma unroll
              for (int i = 0; i < 4 * kTiles; ++i)
                dp[i / 4][i % 4] = is_dead(s[i / 4][i % 4]) ? 0.0f : dp[i / 4][i % 4];
            }
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) dp[i / 4][i % 4] *= s[i / 4][i % 4];
          } else {
            const int member = member_of(stage);
            if (member != bound_member) {
              if (bound_member >= 0) head.flush_head();
              const KeyBlock block = block_of(number);
              head.bind(params, outer_index(common, block.outer), block.kv_head * group + member);
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
          uint32_t probs[kTiles / 2][4], dscores[kTiles / 2][4];
          pack(probs, s);
          pack(dscores, dp);
          const uint32_t score_offset = step % Shape::kScoreStages * ScoreTile::kBytes;
          store_scores(lane_scores + score_offset, dscores);
          if constexpr (kSharesKeys)
            store_scores(lane_scores + (Shape::kProbs - Shape::kDscores) + score_offset, probs);
          fence_proxy_async();
          if constexpr (!kSharesKeys) multiply_keys<DoutTile>(acc_dv, probs, dout(stage));
          named_barrier_sync(kBoth, Shape::kConsumers);
          const uint32_t score_tile = shared + Shape::kDscores + score_offset;
          if constexpr (kSharesKeys) {
            multiply_keys<DoutTile>(acc_dv, score_tile + (Shape::kProbs - Shape::kDscores),
                                    dout(stage) + first_unit_v / 8 * DoutTile::kChunkBytes);
            // Additions keep a warp for as long as the products take, so half of them wait for the next scores.
            float dq[kWidthK / 16][4], other_dq[kWidthK / 16][4];
            const uint32_t key_columns = shared + first_unit_k / 8 * KeyTile::kChunkBytes;
            multiply_dquery(dq, score_tile, key_columns);
            multiply_dquery(other_dq, score_tile, key_columns + (kWidthK == 128 ? KeyTile::kChunkBytes : 64));
            wgmma_wait<2>();
            wgmma_touch(acc_dv);
            if (is_leader) mbarrier_arrive(dout_empty(stage));
            multiply_keys<QueryTile>(acc_dk, score_tile, query(stage) + first_unit_k / 8 * QueryTile::kChunkBytes);
            wgmma_wait<2>();
            wgmma_touch(dq);
            add_dquery(params, dq, late_row, first_unit_k / 2, warp, lane);
            wgmma_wait<0>();
            wgmma_touch(other_dq);
            // No plain copy: ptxas would keep the accumulators, and wait for all products before they are read.
            const unsigned zero = opaque(0u);
#pragma unroll
            for (int i = 0; i < kWidthK / 4; ++i)
              late_dq[i / 4][i % 4] = __uint_as_float(__float_as_uint(other_dq[i / 4][i % 4]) | zero);
          } else {
            const auto dquery_of = [&](auto tiles, uint32_t dscore_rows, uint32_t key_columns) {
              float dq[decltype(tiles)::kValue][4];
              const uint32_t row = load_shared_u32(query_info(stage) + 8);  // now: later it would be waited for
              multiply_dquery(dq, dscore_rows, key_columns);
              wgmma_wait<1>();
              wgmma_touch(acc_dv);
              if (is_leader) mbarrier_arrive(dout_empty(stage));
              multiply_keys<QueryTile>(acc_dk, dscores, query(stage));
              wgmma_wait<1>();
              wgmma_touch(dq);
              const int slot = begin_part(part, warpgroup);
              stage_dquery(dq, slot, warp, lane);
              if (is_leader) {
                store_shared_8(part_info(slot), kAddDquery, row);
                if constexpr (Config::kDeterministic) {
                  store_shared_8(part_info(slot) + 8, load_shared_u32(query_info(stage) + 12),
                                 load_shared_u32(block_info(number)) + 1);
                }
              }
              end_part(&part, slot);
            };
            if constexpr (kQTile == 128) {
              dquery_of(Integer<kWidthK / 8>{}, score_tile + warpgroup * 8192, shared);
            } else if constexpr (kWidthK == 128) {
              dquery_of(Integer<8>{}, score_tile, shared + warpgroup * KeyTile::kChunkBytes);
            } else if (warpgroup == 0) {
              dquery_of(Integer<8>{}, score_tile, shared);
            } else if constexpr (Shape::kNumDqueryParts == 2) {
              dquery_of(Integer<(kWidthK - 64) / 8>{}, score_tile, shared + KeyTile::kChunkBytes);
            } else {
              wgmma_wait<0>();
              wgmma_touch(acc_dv);
              if (is_leader) mbarrier_arrive(dout_empty(stage));
              multiply_keys<QueryTile>(acc_dk, dscores, query(stage));
            }
          }
          wgmma_wait<0>();
          wgmma_touch(acc_dk);
          if (is_leader) mbarrier_arrive(query_empty(stage));
          tile_info = receive_tile(++step);
        } while ((tile_info & kIsFirst) == 0);
        if constexpr (kSharesKeys) add_dquery(params, late_dq, late_row, first_unit_k / 2 + kWidthK / 32, warp, lane);
      }
      if constexpr (!kIsPlain) {
        if (bound_member >= 0) head.flush_head();
      }
      const float scale = load_shared_f32(block_info(number) + 12);
      if constexpr (kSharesKeys) {
        // Keys and values are read by both warpgroups and become the place of dK and dV.
        named_barrier_sync(kBoth, Shape::kConsumers);
        const KeyBlock block = block_of(number);
        const OuterIndex outer = outer_index(common, block.outer);
        const int first = block.tile * kKvTile + key_row, num_rows = common.kv_seq_len - first;
        if (params.dvalue.data != nullptr) {
          store_rows<ValueTile>(
              acc_dv, 1.0f, shared + Shape::kValue, key_row, first_unit_v,
              at_outer<Element>(params.dvalue, outer, block.kv_head) + first * params.dvalue.row_stride,
              params.dvalue.row_stride, num_rows, common.value_head_dim, lane);
        }
        if (params.dkey.data != nullptr) {
          store_rows<KeyTile>(acc_dk, scale, shared, key_row, first_unit_k,
                              at_outer<Element>(params.dkey, outer, block.kv_head) + first * params.dkey.row_stride,
                              params.dkey.row_stride, num_rows, common.head_dim, lane);
        }
        fence_proxy_async();
        mbarrier_arrive(keys_empty());
      } else {
        if (is_leader) mbarrier_arrive(keys_empty());
        if (params.dvalue.data != nullptr) {
          const int slot = begin_part(part, warpgroup);
          pack_rows<typename Shape::ValueRows>(acc_dv, 1.0f, dquery(slot), 16 * warp, 0, lane);
          if (is_leader) store_shared_8(part_info(slot), kStoreDvalue, number);
          end_part(&part, slot);
        }
        if (params.dkey.data != nullptr) {
          const int slot = begin_part(part, warpgroup);
          pack_rows<typename Shape::KeyRows>(acc_dk, scale, dquery(slot), 16 * warp, 0, lane);
          if (is_leader) store_shared_8(part_info(slot), kStoreDkey, number);
          end_part(&part, slot);
        }
      }
      ++number;
    }
    if constexpr (!kSharesKeys) {
      for (unsigned i = part < Shape::kDqueryStages ? 0 : part - Shape::kDqueryStages; i < part; ++i)
        named_barrier_sync(kPartEmpty + part_slot(i, warpgroup), 160);
      const int slot = part_slot(part, warpgroup);
      if (is_leader) store_shared_u32(part_info(slot), kNoMoreParts);
      named_barrier_arrive(kPartFull + slot, 160);
    }
  }

  FKL_DEVICE int member_of(int stage) const { return static_cast<int>(load_shared_u32(query_info(stage) + 4)); }

  // The next tile, or what stands for none.
  FKL_DEVICE int receive_tile(unsigned step) const {
    const int stage = static_cast<int>(step % kStages);
    mbarrier_wait(query_full(stage), step / kStages % 2);
    return static_cast<int>(load_shared_u32(query_info(stage)));
  }

  // A part is handed to the warp that moves it between `begin_part`, which waits for its slot, and `end_part`.
  static FKL_DEVICE int part_slot(unsigned part, int warpgroup) {
    return 2 * static_cast<int>(part % Shape::kDqueryStages) + warpgroup;
  }
  FKL_DEVICE int begin_part(unsigned part, int warpgroup) const {
    const int slot = part_slot(part, warpgroup);
    if (part >= Shape::kDqueryStages) named_barrier_sync(kPartEmpty + slot, 160);
    return slot;
  }
  FKL_DEVICE void end_part(unsigned* part, int slot) const {
    fence_proxy_async();
    named_barrier_arrive(kPartFull + slot, 160);
    ++*part;
  }

  // From registers, with kSharesKeys; `row` of the accumulator.
  template <int kAccTiles>
  FKL_DEVICE void add_dquery(const BackwardParams& params, const float (&dq)[kAccTiles][4], unsigned row,
                             int first_pair, int warp, int lane) const {
    constexpr int kPairs = Config::kHeadDim / 16;
    float* blocks = params.dquery_accumulator + static_cast<long long>(row) * Config::kHeadDim +
                    (warp * kPairs + first_pair) * DqueryBlock::kFloats;
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
  __syncthreads();
  if (warp < 4) {
    register_count_decrease<Kernel::kOtherRegisters>();
    if (warp == 0) {
      kernel.produce(params);
    } else if (!Kernel::kSharesKeys && warp < 3) {
      kernel.move_parts(params, warp - 1);
    }
  } else {
    register_count_increase<Kernel::kConsumerRegisters>();
    kernel.consume(params, warp / 4 - 1);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_BACKWARD_KEYS_SM90_CUH_
