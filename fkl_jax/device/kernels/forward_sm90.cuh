// Forward pass on compute capability 9.0: wgmma, TMA, warps with roles.
//
// A block works on query tiles of kQTile rows of one head, one after the other (kIsPersistent: as a counter hands them
// out, else on one):
//
//   warpgroup 0, warp 0      loader: all loads, by TMA
//   warpgroup 0, warp 1      planner: what a query tile needs (Work), and which tiles of keys are not dead; runs ahead
//   warpgroup 0, warps 2-3   checkers: look for NaN and infinity in the values of mixed tiles, if there can be any
//   warpgroups 1 ..          consumers, 64 rows each: S = Q K^T -> scores -> P = exp2(S - row_max) -> O += P V, with S,
//                            P and O in registers. O += P V of a tile runs under the softmax of the next.
//
// Shared memory, 128-byte swizzled in chunks of 64 columns: Q, rings of kNumStages tiles of K and of V, O (in the place
// of Q without kHasOutBuffer). The planner says in a word which tile of keys is next, whether it is mixed, and whether
// it is the first or last of its query tile; the loader puts that word beside the tile that it loads.
#ifndef FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_
#define FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_

#include "attention/forward_scores.cuh"
#include "attention/id_ranges.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/poisoned_values.cuh"
#include "attention/softmax.cuh"
#include "attention/stale_softmax.cuh"
#include "attention/tile_order.cuh"
#include "core/math.cuh"
#include "core/ptx.cuh"
#include "core/ptx_sm90.cuh"
#include "tile/layout.cuh"
#include "tile/mma.cuh"

namespace fkl {

constexpr int kWarpgroup = 128;
constexpr int kSwizzleAlignment = 1024;
constexpr int kSwizzleColumns = 64, kSwizzleBytes = 128;  // a chunk of columns: one span of the swizzle

template <class Config>
struct ForwardShape90 {
  using Element = typename Config::Element;
  static constexpr int kQTile = Config::kQTile, kKvTile = Config::kKvTile, kNumStages = Config::kNumStages;
  static constexpr int kNumConsumers = kQTile / 64;
  static constexpr int kThreads = kWarpgroup * (kNumConsumers + 1);
  static_assert(sizeof(Element) == 2 && Config::kAligned, "what TMA and wgmma take");
  static_assert(kQTile % 64 == 0 && kKvTile % 16 == 0 && kKvTile <= 192, "whole products; 8 rows are bits of a word");
  static_assert(kKvTile >= 64 && kNumStages >= 2, "bits of TileWord; keys are a tile ahead of values");
  static constexpr bool kHasOutBuffer = Config::kHasOutBuffer;
  // The planner is ahead of the consumers, who have one query tile to store and the next at work.
  static constexpr int kNumWorks = Config::kIsPersistent ? 4 : 1;
  static constexpr int kNumPlans = 8;  // words that the planner may be ahead of the loader

  // Columns come in chunks of the swizzle; products take only those that there are.
  static constexpr int kHeadChunks = ceil_div(Config::kHeadDim, kSwizzleColumns);
  static constexpr int kValueChunks = ceil_div(Config::kValueHeadDim, kSwizzleColumns);
  static constexpr int kValueColumns = max_int(Config::kValueHeadDim, kSwizzleColumns);
  static_assert(kHasOutBuffer || (kHeadChunks >= kValueChunks && !Config::kIsPersistent),
                "O takes the place of Q, which must not be loaded for the next tile yet");

  static constexpr int kQueryBytes = 64 * kHeadChunks * kSwizzleBytes;  // of a warpgroup
  static constexpr int kOutBytes = 64 * kValueChunks * kSwizzleBytes;
  static constexpr int kKeyBytes = kKvTile * kHeadChunks * kSwizzleBytes;
  static constexpr int kValueBytes = kKvTile * kValueChunks * kSwizzleBytes;

  static constexpr int kKey = kNumConsumers * kQueryBytes;
  static constexpr int kValue = kKey + kNumStages * kKeyBytes;
  static constexpr int kOut = kHasOutBuffer ? kValue + kNumStages * kValueBytes : 0;
  static constexpr int kWorks = kValue + kNumStages * kValueBytes + (kHasOutBuffer ? kNumConsumers * kOutBytes : 0);
  static constexpr int kMaxWorkBytes = 1024;
  static constexpr int kBarriers = kWorks + kNumWorks * kMaxWorkBytes;

  // mbarriers by number.
  static constexpr int kQueryFull = 0, kQueryEmpty = kQueryFull + kNumConsumers;
  static constexpr int kKeyFull = kQueryEmpty + kNumConsumers, kKeyEmpty = kKeyFull + kNumStages;
  static constexpr int kValueFull = kKeyEmpty + kNumStages, kValueEmpty = kValueFull + kNumStages;
  static constexpr int kValueChecked = kValueEmpty + kNumStages;
  static constexpr int kWorkEmpty = kValueChecked + kNumStages;
  static constexpr int kPlanFull = kWorkEmpty + kNumWorks, kPlanEmpty = kPlanFull + kNumPlans;
  static constexpr int kNumBarriers = kPlanEmpty + kNumPlans;
  static constexpr int kKeyWords = kBarriers + 8 * kNumBarriers;
  static constexpr int kValueWords = kKeyWords + 4 * kNumStages;
  static constexpr int kPlanWords = kValueWords + 4 * kNumStages;
  // Which rows of values were cleared: 4 words of each checker.
  static constexpr int kCleared = round_up(kPlanWords + 4 * kNumPlans, 16);
  static constexpr int kSharedBytes = kSwizzleAlignment + kCleared + 32 * kNumStages;

  // Registers: consumers hold S, two sets of P and O. What is left goes to the others.
  static constexpr int kProducerRegisters = kNumConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kNumConsumers == 2 ? 232 : 160;
};

template <class Config>
constexpr int forward_sm90_shared_bytes = ForwardShape90<Config>::kSharedBytes;

// Position in a ring of kSize slots; the parity flips at each turn.
template <int kSize>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  FKL_DEVICE void advance() {
    if (++slot == kSize) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What is said about a tile of keys, and beside it while it is in shared memory.
struct TileWord {
  static constexpr uint32_t kMixed = 1, kLast = 2, kFirst = 4;  // of its query tile
  // No tile: a query tile without any; and nothing will follow.
  static constexpr uint32_t kEmpty = 8, kEnd = 16;

  static FKL_DEVICE uint32_t of(int tile, int state, bool is_first, bool is_last, int work_slot) {
    return static_cast<uint32_t>(tile) << 7 | static_cast<uint32_t>(work_slot) << 5 | (is_first ? kFirst : 0) |
           (is_last ? kLast : 0) | (state == kTileMixed ? kMixed : 0);
  }
  static FKL_DEVICE uint32_t empty(int work_slot) { return static_cast<uint32_t>(work_slot) << 5 | kEmpty; }
  static FKL_DEVICE int tile(uint32_t word) { return static_cast<int>(word >> 7); }
  static FKL_DEVICE int work_slot(uint32_t word) { return static_cast<int>(word >> 5 & 3); }
};

// A branch that is never taken but hangs on both sums. ptxas moves a wait for a wgmma above arithmetic that does not
// need it, and the exponentials would run after the product instead of under it. It knows that a sum of exponentials is
// not negative, so these are sums carried from tile to tile.
FKL_DEVICE void keep_exponentials_here(float sum0, float sum1) {
  asm volatile(
      "{\n.reg .pred never;\n.reg .f32 low;\nmin.f32 low, %0, %1;\nsetp.lt.f32 never, low, 0f00000000;\n"
      "@never nanosleep.u32 1;\n}" ::"f"(sum0),
      "f"(sum1)
      : "memory");
}

template <class Config, class ScoreMod, class MaskMod>
struct Forward90 {
  using Shape = ForwardShape90<Config>;
  using Element = typename Config::Element;
  using Scores = ForwardScores<Config, ScoreMod, MaskMod>;
  using Mask = typename Scores::Mask;
  using Fragment = typename Mma<Element>::FragmentA;
  static constexpr int kQTile = Shape::kQTile, kKvTile = Shape::kKvTile, kNumStages = Shape::kNumStages;
  static constexpr int kNumConsumers = Shape::kNumConsumers, kNumWorks = Shape::kNumWorks;
  static constexpr int kScoreTiles = kKvTile / 8, kOutTiles = Shape::kValueColumns / 8;
  using Walk = TileWalk<Mask, kQTile, kKvTile, true, Config::kHasSegmentIds>;
  using Ranges = IdRanges<Config, kKvTile>;
  using TileRing = Ring<kNumStages>;
  using WorkRing = Ring<kNumWorks>;
  using PlanRing = Ring<Shape::kNumPlans>;
  using Poisoned = PoisonedValues<TileLayout<Element, kKvTile, Config::kValueHeadDim>, kWarpgroup>;

  // Dead keys within the arrays have values; TMA reads zeros beyond them.
  static constexpr bool kGuardsValues = !Mask::kIsTrivial || Config::kHasKvLengths;
  static constexpr int kNumCheckers = 2;  // warps

  // Launch.tensor_maps.
  enum Map { kQueryMap, kKeyMap, kValueMap, kOutMap };
  // Named barriers, plus the warpgroup.
  enum Barrier { kTurn = 1, kStore = kTurn + kNumConsumers };

  // What is to be known of a query tile.
  struct Work {
    Scores scores;
    const Element* value;
    float* lse;
    float sink;
    int q_first, head, kv_head;
    int query_outer, key_outer, value_outer, out_outer;
  };
  static_assert(sizeof(Work) <= Shape::kMaxWorkBytes, "");

  const ForwardParams& params;
  unsigned char* memory;
  uint32_t shared;

  FKL_DEVICE uint32_t barrier(int number) const {
    return shared + static_cast<uint32_t>(Shape::kBarriers + 8 * number);
  }
  FKL_DEVICE uint32_t key(int slot) const {
    return shared + static_cast<uint32_t>(Shape::kKey + slot * Shape::kKeyBytes);
  }
  FKL_DEVICE uint32_t value(int slot) const {
    return shared + static_cast<uint32_t>(Shape::kValue + slot * Shape::kValueBytes);
  }
  FKL_DEVICE uint32_t query(int w) const { return shared + static_cast<uint32_t>(w * Shape::kQueryBytes); }
  FKL_DEVICE uint32_t out(int w) const {
    return shared +
           static_cast<uint32_t>(Shape::kHasOutBuffer ? Shape::kOut + w * Shape::kOutBytes : w * Shape::kQueryBytes);
  }
  FKL_DEVICE uint32_t key_word(int slot) const { return shared + static_cast<uint32_t>(Shape::kKeyWords + 4 * slot); }
  FKL_DEVICE uint32_t value_word(int slot) const {
    return shared + static_cast<uint32_t>(Shape::kValueWords + 4 * slot);
  }
  FKL_DEVICE uint32_t plan_word(int slot) const { return shared + static_cast<uint32_t>(Shape::kPlanWords + 4 * slot); }
  FKL_DEVICE uint32_t cleared(int slot) const { return shared + static_cast<uint32_t>(Shape::kCleared + 32 * slot); }
  FKL_DEVICE Work& work(int slot) const {
    return *reinterpret_cast<Work*>(memory + Shape::kWorks + slot * Shape::kMaxWorkBytes);
  }

  FKL_DEVICE void init_barriers() const {
    for (int w = 0; w < kNumConsumers; ++w) {
      mbarrier_init(barrier(Shape::kQueryFull + w), 1);
      mbarrier_init(barrier(Shape::kQueryEmpty + w), 1);
    }
    for (int s = 0; s < kNumStages; ++s) {
      mbarrier_init(barrier(Shape::kKeyFull + s), 1);
      mbarrier_init(barrier(Shape::kKeyEmpty + s), kNumConsumers);
      mbarrier_init(barrier(Shape::kValueFull + s), 1);
      mbarrier_init(barrier(Shape::kValueEmpty + s), kNumConsumers + (kGuardsValues ? kNumCheckers : 0));
      mbarrier_init(barrier(Shape::kValueChecked + s), kNumCheckers);
    }
    for (int i = 0; i < kNumWorks; ++i) {
      mbarrier_init(barrier(Shape::kWorkEmpty + i), 4 * kNumConsumers);
    }
    for (int i = 0; i < Shape::kNumPlans; ++i) {
      mbarrier_init(barrier(Shape::kPlanFull + i), 1);
      mbarrier_init(barrier(Shape::kPlanEmpty + i), 1);
    }
    mbarrier_init_fence();
  }

  // ---- planner: a warp

  FKL_DEVICE void push_plan(PlanRing* ring, uint32_t word, bool is_leader) const {
    if (is_leader) {
      mbarrier_wait(barrier(Shape::kPlanEmpty + ring->slot), ring->parity ^ 1);
      store_shared_u32(plan_word(ring->slot), word);
      mbarrier_arrive(barrier(Shape::kPlanFull + ring->slot));
    }
    ring->advance();
  }

  FKL_DEVICE void plan() const {
    const CommonParams& common = params.common;
    const bool is_leader = elect_one();
    const QueryTileOrder<Element> order(common, kQTile);
    PlanRing plans;
    WorkRing works;
    if constexpr (Config::kHasSegmentIds) Ranges(common, params.scratch).find(common);
    const int num_items = order.size();
    int item = block_index();
#pragma unroll 1
    while (item < num_items) {
      // Asked for now, needed at the end.
      int next_item = num_items;
      if (Config::kIsPersistent && is_leader)
        next_item = static_cast<int>(gridDim.x) + atomicAdd(static_cast<int*>(params.scratch), 1);

      const QueryTileIndex index = order.at(item);
      const OuterIndex outer = outer_index(common, index.outer);
      Work& now = work(works.slot);
      mbarrier_wait(barrier(Shape::kWorkEmpty + works.slot), works.parity ^ 1);
      now.q_first = index.tile * kQTile;
      now.head = index.head;
      now.kv_head = index.head / (common.num_q_heads / common.num_kv_heads);
      now.query_outer = map_outer(params.maps, kQueryMap, outer);
      now.key_outer = map_outer(params.maps, kKeyMap, outer);
      now.value_outer = map_outer(params.maps, kValueMap, outer);
      now.out_outer = map_outer(params.maps, kOutMap, outer);
      now.scores.bind(common, outer, index.head);
      now.lse = params.lse + (index.outer * common.num_q_heads + index.head) * common.q_seq_len;
      now.value = at_outer<const Element>(common.value, outer, now.kv_head);
      now.sink = -infinity();
      if constexpr (Config::kHasSinks) now.sink = __ldg(at_outer<const float>(common.sinks, outer) + index.head);
      __syncwarp();
      const Mask& mask = now.scores.mask;
      // Rows beyond q_end are not asked about: they must not make tiles mixed.
      const int q_first = now.q_first, q_last = min_int(q_first + kQTile, mask.q_end()) - 1;
      const IdRange* ranges = nullptr;
      if constexpr (Config::kHasSegmentIds) ranges = Ranges(common, params.scratch).of(index.outer);
      Walk walk(mask, q_first, q_last, 0, ceil_div(common.kv_seq_len, kKvTile), ranges);
      int tile = 0, state = kTileDead;
      bool has_tile = walk.next(mask, &tile, &state), is_first = true;
      if (!has_tile) push_plan(&plans, TileWord::empty(works.slot), is_leader);
#pragma unroll 1
      while (has_tile) {
        int next_tile = 0, next_state = kTileDead;
        const bool has_next = walk.next(mask, &next_tile, &next_state);
        push_plan(&plans, TileWord::of(tile, state, is_first, !has_next, works.slot), is_leader);
        is_first = false;
        tile = next_tile;
        state = next_state;
        has_tile = has_next;
      }
      works.advance();
      item = __shfl_sync(0xffffffffu, next_item, __ffs(__ballot_sync(0xffffffffu, is_leader)) - 1);
    }
    push_plan(&plans, TileWord::kEnd, is_leader);
  }

  // ---- loader: a thread

  FKL_DEVICE void load_query(const Work& of, int w, uint32_t parity) const {
    const uint32_t full = barrier(Shape::kQueryFull + w);
    mbarrier_wait(barrier(Shape::kQueryEmpty + w), parity ^ 1);
    mbarrier_arrive_expect_bytes(full, Shape::kQueryBytes);
#pragma unroll
    for (int c = 0; c < Shape::kHeadChunks; ++c)
      tma_load_4d(query(w) + static_cast<uint32_t>(c * 64 * kSwizzleBytes), &params.maps.map[kQueryMap], full,
                  kSwizzleColumns * c, of.head, of.q_first + 64 * w, of.query_outer);
  }
  FKL_DEVICE void prefetch_query(const Work& of) const {
#pragma unroll
    for (int i = 0; i < kNumConsumers * Shape::kHeadChunks; ++i)
      tma_prefetch_4d(&params.maps.map[kQueryMap], kSwizzleColumns * (i % Shape::kHeadChunks), of.head,
                      of.q_first + 64 * (i / Shape::kHeadChunks), of.query_outer);
  }
  FKL_DEVICE void load_key(const Work& of, TileRing* ring, uint32_t word) const {
    const int s = ring->slot;
    const uint32_t full = barrier(Shape::kKeyFull + s);
    mbarrier_wait(barrier(Shape::kKeyEmpty + s), ring->parity ^ 1);
    store_shared_u32(key_word(s), word);
    mbarrier_arrive_expect_bytes(full, Shape::kKeyBytes);
#pragma unroll
    for (int c = 0; c < Shape::kHeadChunks; ++c)
      tma_load_4d(key(s) + static_cast<uint32_t>(c * kKvTile * kSwizzleBytes), &params.maps.map[kKeyMap], full,
                  kSwizzleColumns * c, of.kv_head, TileWord::tile(word) * kKvTile, of.key_outer);
    ring->advance();
  }
  FKL_DEVICE void load_value(const Work& of, TileRing* ring, uint32_t word) const {
    const int s = ring->slot;
    const uint32_t full = barrier(Shape::kValueFull + s);
    mbarrier_wait(barrier(Shape::kValueEmpty + s), ring->parity ^ 1);
    store_shared_u32(value_word(s), word);
    mbarrier_arrive_expect_bytes(full, Shape::kValueBytes);
#pragma unroll
    for (int c = 0; c < Shape::kValueChunks; ++c)
      tma_load_4d(value(s) + static_cast<uint32_t>(c * kKvTile * kSwizzleBytes), &params.maps.map[kValueMap], full,
                  kSwizzleColumns * c, of.kv_head, TileWord::tile(word) * kKvTile, of.value_outer);
    ring->advance();
  }

  // A word without a tile.
  FKL_DEVICE void pass_on(TileRing* ring, int first_full, int first_empty, uint32_t to_word, uint32_t word) const {
    mbarrier_wait(barrier(first_empty + ring->slot), ring->parity ^ 1);
    store_shared_u32(to_word, word);
    mbarrier_arrive(barrier(first_full + ring->slot));
    ring->advance();
  }

  FKL_DEVICE void load() const {
    PlanRing plans;
    TileRing key_ring, value_ring;
    uint32_t query_parity = 0;
    uint32_t word = 0;
#pragma unroll 1
    do {
      const uint32_t word_before = word;
      mbarrier_wait(barrier(Shape::kPlanFull + plans.slot), plans.parity);
      word = load_shared_u32(plan_word(plans.slot));
      mbarrier_arrive(barrier(Shape::kPlanEmpty + plans.slot));
      plans.advance();
      if (word & (TileWord::kEmpty | TileWord::kEnd)) {
        pass_on(&key_ring, Shape::kKeyFull, Shape::kKeyEmpty, key_word(key_ring.slot), word);
        continue;
      }
      const Work& now = work(TileWord::work_slot(word));
      const bool is_first = word & TileWord::kFirst;
      // Its place is free when the last product of the query tile before is done: it should not be far then.
      if (Config::kIsPersistent && is_first) prefetch_query(now);
      load_key(now, &key_ring, word);
      // Keys run one tile ahead of values.
      if (is_first) {
#pragma unroll
        for (int w = 0; w < kNumConsumers; ++w) load_query(now, w, query_parity);
        query_parity ^= 1;
      } else {
        load_value(now, &value_ring, word_before);
      }
      if (word & TileWord::kLast) load_value(now, &value_ring, word);
    } while (!(word & TileWord::kEnd));
    if (kGuardsValues) pass_on(&value_ring, Shape::kValueFull, Shape::kValueEmpty, value_word(value_ring.slot), word);
  }

  // ---- checkers: values under a mask may be NaN or infinite, and 0 * NaN is NaN. Rows of V that hold such an element
  // are cleared before the product sees them; the consumers add them to the rows whose P is not 0.

  FKL_DEVICE void check_values(int checker, int lane) const {
    TileRing ring;
#pragma unroll 1
    while (true) {
      const int s = ring.slot;
      mbarrier_wait(barrier(Shape::kValueFull + s), ring.parity);
      const uint32_t word = load_shared_u32(value_word(s));
      if (word & TileWord::kEnd) return;
      if (word & TileWord::kMixed) {
        uint32_t any_rows = 0;
#pragma unroll 1
        for (int number = 0; number < 4; ++number) {
          uint32_t rows = 0;
#pragma unroll 1
          for (int i = 0; i < 4; ++i) {
            // Of eight rows: 1024 bytes in each chunk of columns.
            const int group = (4 * number + i) * kNumCheckers + checker;
            if (group >= kKvTile / 8) break;
            const uint32_t first = value(s) + static_cast<uint32_t>(group * 8 * kSwizzleBytes);
            NonFiniteTest<Element> test;
#pragma unroll
            for (int c = 0; c < Shape::kValueChunks; ++c) {
#pragma unroll
              for (int half = 0; half < 2; ++half)
                test.add(load_shared_16(first + static_cast<uint32_t>(c * kKvTile * kSwizzleBytes +
                                                                      (half * kWarpSize + lane) * kChunkBytes)));
            }
            if (__any_sync(0xffffffffu, test.found())) rows |= clear_rows(first, lane) << 8 * i;
          }
          if (lane == 0) store_shared_u32(cleared(s) + static_cast<uint32_t>(16 * checker + 4 * number), rows);
          any_rows |= rows;
        }
        if (any_rows) fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier(Shape::kValueChecked + s));
      }
      if (lane == 0) mbarrier_arrive(barrier(Shape::kValueEmpty + s));
      ring.advance();
    }
  }

  // Of eight rows at `first`; bit r of the result: row r had to be cleared.
  FKL_DEVICE uint32_t clear_rows(uint32_t first, int lane) const {
    uint32_t rows = 0;
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {
      // The swizzle moves chunks of 16 bytes about within a row; all of them are looked at.
      const uint32_t chunk = first + static_cast<uint32_t>(row * kSwizzleBytes + lane % 8 * kChunkBytes +
                                                           lane / 8 * kKvTile * kSwizzleBytes);
      const bool is_chunk = lane / 8 < Shape::kValueChunks;
      const bool found = is_chunk && has_non_finite<Element>(load_shared_16(chunk));
      if (!__any_sync(0xffffffffu, found)) continue;
      if (is_chunk) store_shared_16(chunk, Chunk16{{0, 0, 0, 0}});
      rows |= 1u << row;
    }
    return rows;
  }

  // ---- consumers: a warpgroup

  struct Consumer {
    int w;  // warpgroup
    int warp, lane;
    bool is_leader;
    TileRing key_ring, value_ring;
    uint32_t query_parity = 0;
    uint32_t checked_parity = 0;  // bit: stage
    StaleSoftmax<Element> softmax;
  };

  FKL_DEVICE void issue_scores(const Consumer& me, float (&acc_s)[kScoreTiles][4]) const {
    const uint64_t q = wgmma_descriptor(query(me.w), 64), k = wgmma_descriptor(key(me.key_ring.slot), kKvTile);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 16; ++i)
      Wgmma<Element, kKvTile>::template ss<0, 0>(acc_s, q + static_cast<uint64_t>(wgmma_k_major_offset(64, i)),
                                                 k + static_cast<uint64_t>(wgmma_k_major_offset(kKvTile, i)), i != 0);
    wgmma_commit();
  }
  FKL_DEVICE void issue_out(const Consumer& me, float (&acc_o)[kOutTiles][4],
                            const Fragment (&probs)[kScoreTiles / 2]) const {
    const uint64_t v = wgmma_descriptor(value(me.value_ring.slot), kKvTile);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKvTile / 16; ++i)
      Wgmma<Element, Shape::kValueColumns>::template rs<1>(acc_o, probs[i].reg,
                                                           v + static_cast<uint64_t>(wgmma_mn_major_offset(i)), 1);
    wgmma_commit();
  }
  FKL_DEVICE void release(const Consumer& me, int first_barrier, TileRing* ring) const {
    if (me.is_leader) mbarrier_arrive(barrier(first_barrier + ring->slot));
    ring->advance();
  }

  FKL_DEVICE void apply_scores(const Scores& scores, int q_first, const Consumer& me, float (&acc_s)[1][kScoreTiles][4],
                               uint32_t word) const {
    const auto row_of = [&](int, int half) {
      return scores.clip_row(q_first + 64 * me.w + 16 * me.warp + 8 * half + me.lane / 4);
    };
    const int kv_lane = TileWord::tile(word) * kKvTile + 2 * (me.lane % 4);
    if (word & TileWord::kMixed) {
      scores.template apply<true>(acc_s, row_of, kv_lane);
    } else {
      scores.template apply<false>(acc_s, row_of, kv_lane);
    }
  }

  // Adds the rows of values that the checkers cleared. Nothing is in flight.
  FKL_DEVICE void add_cleared(const Work& now, Consumer* me, float (&acc_o)[1][kOutTiles][4],
                              const Fragment (&probs)[1][kScoreTiles / 2], uint32_t word) const {
    const int s = me->value_ring.slot;
    mbarrier_wait(barrier(Shape::kValueChecked + s), me->checked_parity >> s & 1);
    me->checked_parity ^= 1u << s;
    const Chunk16 first = load_shared_16(cleared(s));
    const Chunk16 second = load_shared_16(cleared(s) + 16);
    uint32_t any_rows = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) any_rows |= first.word[i] | second.word[i];
    if (any_rows == 0) return;
#pragma unroll 1
    for (int i = 0; i < 4 * kNumCheckers; ++i) {
      uint32_t rows = load_shared_u32(cleared(s) + static_cast<uint32_t>(4 * i));
#pragma unroll 1
      for (; rows != 0; rows &= rows - 1) {
        const int bit = __ffs(static_cast<int>(rows)) - 1;
        const int row = ((i % 4 * 4 + bit / 8) * kNumCheckers + i / 4) * 8 + bit % 8;
        Poisoned::template add<Mma<Element>>(
            acc_o, probs, row, now.value + (TileWord::tile(word) * kKvTile + row) * params.common.value.row_stride,
            params.common.value_head_dim, me->lane);
      }
    }
  }

  FKL_DEVICE void take_turn(const Consumer& me) const { named_barrier_sync(kTurn + me.w, 2 * kWarpgroup); }
  FKL_DEVICE void pass_turn(const Consumer& me) const {
    named_barrier_arrive(kTurn + (me.w + 1 == kNumConsumers ? 0 : me.w + 1), 2 * kWarpgroup);
  }

  // Waits for the next tile of keys, or what is said in its place.
  FKL_DEVICE uint32_t next_word(const Consumer& me, bool is_here) const {
    if (!is_here) mbarrier_wait(barrier(Shape::kKeyFull + me.key_ring.slot), me.key_ring.parity);
    return load_shared_u32(key_word(me.key_ring.slot));
  }
  FKL_DEVICE void wait_for_query(Consumer* me) const {
    mbarrier_wait(barrier(Shape::kQueryFull + me->w), me->query_parity);
    me->query_parity ^= 1;
  }
  // After the product with the tile of keys at the ring's place.
  FKL_DEVICE void release_keys(Consumer* me, uint32_t word) const {
    if (Config::kIsPersistent && (word & TileWord::kLast) && me->is_leader)
      mbarrier_arrive(barrier(Shape::kQueryEmpty + me->w));
    release(*me, Shape::kKeyEmpty, &me->key_ring);
  }

  // From the first tile `word` of a query tile on. Query tiles follow each other without a gap: while the last product
  // of one runs, the scores of the next are made. Ends with the last tile after which there is no other tile, to which
  // `word` is set; its result is left in `acc_o`, all others are stored.
  FKL_DEVICE void consume_tiles(uint32_t* last_word, Consumer* me, float (&acc_o)[1][kOutTiles][4]) const {
    // ptxas joins two sets of registers that a plain copy connects, and P of the next tile would be written while the
    // product reads P of this one (C7513, all in sequence). A zero that only the host knows keeps them apart.
    const uint32_t zero = static_cast<uint32_t>(params.num_splits - 1);
    uint32_t word = *last_word;
    Fragment probs[1][kScoreTiles / 2];
    wait_for_query(me);
    {
      float acc_s[1][kScoreTiles][4];
      issue_scores(*me, acc_s[0]);
      const Work& now = work(TileWord::work_slot(word));
      const Scores scores = now.scores;
      const int q_first = now.q_first;
      wgmma_wait<0>();
      wgmma_touch(acc_s[0]);
      release_keys(me, word);
      apply_scores(scores, q_first, *me, acc_s, word);
      float factor[2];
      me->softmax.update(probs[0], factor, acc_s[0], scores.to_log2);
    }
    bool key_is_here = false, value_is_here = false;
#pragma unroll 1
    while (true) {
      if (kGuardsValues && (word & TileWord::kMixed))
        add_cleared(work(TileWord::work_slot(word)), me, acc_o, probs, word);
      const bool is_last = word & TileWord::kLast;
      if (!Config::kIsPersistent && is_last) break;
      const uint32_t next = next_word(*me, key_is_here);
      const bool is_first = Config::kIsPersistent && (next & TileWord::kFirst);
      if (is_last && !is_first) break;
      if (is_first) wait_for_query(me);
      float acc_s[1][kScoreTiles][4];
      take_turn(*me);
      issue_scores(*me, acc_s[0]);
      if (!value_is_here) mbarrier_wait(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
      issue_out(*me, acc_o[0], probs[0]);
      pass_turn(*me);
      // Read under the products; and once, the loops over elements would do it again and again.
      const Work& now = work(TileWord::work_slot(next));
      const Scores scores = now.scores;
      const int q_first = now.q_first;
      wgmma_wait<1>();
      wgmma_touch(acc_s[0]);
      release_keys(me, next);
      apply_scores(scores, q_first, *me, acc_s, next);
      const StaleSoftmax<Element> before = me->softmax;
      if (is_first) me->softmax.start(acc_s[0], scores.to_log2);
      Fragment next_probs[kScoreTiles / 2];
      float total[2];
      const bool is_usable = me->softmax.try_exponentiate(next_probs, total, acc_s[0], scores.to_log2) || is_first;
      keep_exponentials_here(total[0], total[1]);
      wgmma_wait<0>();
      wgmma_touch(acc_o[0]);
      release(*me, Shape::kValueEmpty, &me->value_ring);
      if (__any_sync(0xffffffffu, !is_usable)) {
        float factor[2];
        me->softmax.update(probs[0], factor, acc_s[0], scores.to_log2);
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc_o[0][tile][i] *= factor[i / 2];
        }
      } else {
        me->softmax.row_sum[0] = total[0];
        me->softmax.row_sum[1] = total[1];
#pragma unroll
        for (int step = 0; step < kScoreTiles / 2; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) probs[0][step].reg[i] = next_probs[step].reg[i] | zero;
        }
      }
      if (is_first) {
        store_out(TileWord::work_slot(word), before, *me, acc_o);
        clear(acc_o);
      }
      word = next;
      // Asked early, so that the answer's latency is over when it is needed.
      key_is_here = mbarrier_test(barrier(Shape::kKeyFull + me->key_ring.slot), me->key_ring.parity);
      value_is_here = mbarrier_test(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
    }
    mbarrier_wait(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
    issue_out(*me, acc_o[0], probs[0]);
    wgmma_wait<0>();
    wgmma_touch(acc_o[0]);
    release(*me, Shape::kValueEmpty, &me->value_ring);
    *last_word = word;
  }

  FKL_DEVICE void clear(float (&acc_o)[1][kOutTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc_o[0][tile][i] = 0.0f;
    }
  }

  FKL_DEVICE void store_out(int work_slot, StaleSoftmax<Element> softmax, const Consumer& me,
                            const float (&acc_o)[1][kOutTiles][4]) const {
    const Work& now = work(work_slot);
    softmax.finish();
    float factor[2];
    bool is_empty[2];
    // Hidden: what follows from it is found here, not kept in registers since before the loop.
    const int lane = hidden(me.lane), first_row = hidden(16 * me.warp);
    const int q = now.q_first + 64 * me.w + first_row + lane / 4;
    const int q_end = now.scores.mask.q_end(), q_seq_len = params.common.q_seq_len;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowResult row = RowResult::of(softmax.row_max_log2[half], softmax.row_sum[half], now.sink);
      if (q + 8 * half >= q_end) {
        row.is_empty = true;
        row.lse = -infinity();
      }
      factor[half] = row.factor;
      is_empty[half] = row.is_empty;
      if (lane % 4 == 0 && q + 8 * half < q_seq_len) now.lse[q + 8 * half] = row.lse;
    }
    if (Shape::kHasOutBuffer) {  // the store before must have read it
      if (me.is_leader) bulk_wait_read<0>();
      named_barrier_sync(kStore + me.w, kWarpgroup);
    }
    const int row = first_row + lane % 16;
#pragma unroll
    for (int j = 0; j < kOutTiles / 2; ++j) {
      const auto packed = [&](int i) {  // of 16 columns: rows g and g + 8, then the next 8 columns
        const float (&x)[4] = acc_o[0][2 * j + i / 2];
        const int half = i % 2;
        return is_empty[half] ? 0u
                              : Conversion<Element>::pack(x[2 * half] * factor[half], x[2 * half + 1] * factor[half]);
      };
      const int chunk = j % 4 * 2 + lane / 16;
      stmatrix_x4(out(me.w) + static_cast<uint32_t>(j / 4 * 64 * kSwizzleBytes + row * kSwizzleBytes +
                                                     (chunk ^ row % 8) * kChunkBytes),
                  packed(0), packed(1), packed(2), packed(3));
    }
    fence_proxy_async();
    named_barrier_sync(kStore + me.w, kWarpgroup);
    if (me.is_leader) {
#pragma unroll
      for (int c = 0; c < Shape::kValueChunks; ++c)
        tma_store_4d(&params.maps.map[kOutMap], out(me.w) + static_cast<uint32_t>(c * 64 * kSwizzleBytes),
                     kSwizzleColumns * c, now.head, now.q_first + 64 * me.w, now.out_outer);
      bulk_commit();
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier(Shape::kWorkEmpty + work_slot));
  }

  FKL_DEVICE void consume(int w, int warp, int lane) const {
    Consumer me;
    me.w = w;
    me.warp = warp;
    me.lane = lane;
    me.is_leader = threadIdx.x % kWarpgroup == 0;
    if (w == kNumConsumers - 1) named_barrier_arrive(kTurn, 2 * kWarpgroup);  // the first turn is warpgroup 0's
    uint32_t word = next_word(me, false);
#pragma unroll 1
    while (!(word & TileWord::kEnd)) {
      float acc_o[1][kOutTiles][4];
      clear(acc_o);
      me.softmax.clear();
      if (word & TileWord::kEmpty) {
        release(me, Shape::kKeyEmpty, &me.key_ring);
      } else {
        consume_tiles(&word, &me, acc_o);
      }
      store_out(TileWord::work_slot(word), me.softmax, me, acc_o);
      if (!Config::kIsPersistent) break;
      word = next_word(me, false);
    }
    if (me.is_leader) bulk_wait_read<0>();  // the store reads shared memory until here
  }
};

template <class Config, class ScoreMod, class MaskMod>
FKL_DEVICE void forward_sm90(const ForwardParams& params) {
  using Kernel = Forward90<Config, ScoreMod, MaskMod>;
  using Shape = ForwardShape90<Config>;
  alignas(kSwizzleAlignment) extern __shared__ unsigned char forward90_shared[];
  const uint32_t unaligned = shared_address(forward90_shared);
  const uint32_t shared = (unaligned + kSwizzleAlignment - 1) & ~static_cast<uint32_t>(kSwizzleAlignment - 1);
  const Kernel kernel{params, forward90_shared + (shared - unaligned), shared};
  const int warp = warp_index(), lane = lane_index();
  if (threadIdx.x == 0) {
    if (params.common.kv_seq_len > 0) {  // else there are no maps of keys and values
      for (int map = Kernel::kQueryMap; map <= Kernel::kOutMap; ++map) tma_prefetch_map(&params.maps.map[map]);
    }
    kernel.init_barriers();
  }
  __syncthreads();
  if (warp < 4) {
    register_count_decrease<Shape::kProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) kernel.load();
    } else if (warp == 1) {
      kernel.plan();
    } else if (Kernel::kGuardsValues) {
      kernel.check_values(warp - 2, lane);
    }
  } else {
    register_count_increase<Shape::kConsumerRegisters>();
    kernel.consume(warp / 4 - 1, warp % 4, lane);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_
