// Forward pass on compute capability 9.0: wgmma, TMA, warps with roles.
//
// A block works on query tiles of kQTile rows of one head, one after the other (kIsPersistent: as a counter hands them
// out, else on one):
//
//   warpgroup 0, warp 0      producer: which tiles of keys are not dead, and their TMA loads
//   warpgroup 0, warps 1-3   look for NaN and infinity in the values of mixed tiles, if there can be any
//   warpgroups 1 ..          consumers, 64 rows each: S = Q K^T -> scores -> P = exp2(S - row_max) -> O += P V, with S,
//                            P and O in registers. O += P V of a tile runs under the softmax of the next.
//
// Shared memory, 128-byte swizzled in chunks of 64 columns: Q, rings of kNumStages tiles of K and of V, O (in the place
// of Q without kHasOutBuffer). A word beside each tile of a ring says which tile it is, whether it is mixed, and
// whether it is the last: consumers do not walk themselves. What the producer has bound for a query tile is in a Work.
#ifndef FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_
#define FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_

#include "attention/forward_scores.cuh"
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
  static constexpr bool kHasOutBuffer = Config::kHasOutBuffer;
  static constexpr int kNumWorks = Config::kIsPersistent ? 2 : 1;

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
  static constexpr int kWorkFull = kValueChecked + kNumStages, kWorkEmpty = kWorkFull + kNumWorks;
  static constexpr int kNumBarriers = kWorkEmpty + kNumWorks;
  static constexpr int kKeyWords = kBarriers + 8 * kNumBarriers;
  static constexpr int kValueWords = kKeyWords + 4 * kNumStages;
  // Which rows of values were cleared: 2 words of each checking warp, padded to 8.
  static constexpr int kCleared = round_up(kValueWords + 4 * kNumStages, 16);
  static constexpr int kSharedBytes = kSwizzleAlignment + kCleared + 32 * kNumStages;

  // Registers: consumers hold S, two sets of P and O. What is left goes to the producer, which walks.
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

// The word beside a tile of keys or of values.
struct TileWord {
  static constexpr uint32_t kMixed = 1, kLast = 2, kEnd = 0xffffffffu;  // kEnd: no tile at all, no more work

  static FKL_DEVICE uint32_t of(int tile, int state, bool is_last) {
    return static_cast<uint32_t>(tile) << 2 | (is_last ? kLast : 0) | (state == kTileMixed ? kMixed : 0);
  }
  static FKL_DEVICE int tile(uint32_t word) { return static_cast<int>(word >> 2); }
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
  using Walk = TileWalk<Mask, kQTile, kKvTile, true>;
  using TileRing = Ring<kNumStages>;
  using WorkRing = Ring<kNumWorks>;
  using Poisoned = PoisonedValues<TileLayout<Element, kKvTile, Config::kValueHeadDim>, kWarpgroup>;

  // Dead keys within the arrays have values; TMA reads zeros beyond them.
  static constexpr bool kGuardsValues = !Mask::kIsTrivial || Config::kHasKvLengths;
  static constexpr int kNumCheckers = 3;  // warps

  // Launch.tensor_maps.
  enum Map { kQueryMap, kKeyMap, kValueMap, kOutMap };
  // Named barriers, plus the warpgroup.
  enum Barrier { kTurn = 1, kStore = kTurn + kNumConsumers };

  // What the consumers need to know of a query tile.
  struct Work {
    Scores scores;
    const Element* value;
    float* lse;
    float sink;
    int q_first, head, out_outer;
    int num_tiles;  // 0: none, -1: no more work; else some
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
      mbarrier_init(barrier(Shape::kWorkFull + i), 1);
      mbarrier_init(barrier(Shape::kWorkEmpty + i), 4 * kNumConsumers);
    }
    mbarrier_init_fence();
  }

  // ---- producer: one warp

  FKL_DEVICE void load_query(const Work& of, int w, int outer, uint32_t parity, bool is_leader) const {
    if (!is_leader) return;
    const uint32_t full = barrier(Shape::kQueryFull + w);
    mbarrier_wait(barrier(Shape::kQueryEmpty + w), parity ^ 1);
    mbarrier_arrive_expect_bytes(full, Shape::kQueryBytes);
#pragma unroll
    for (int c = 0; c < Shape::kHeadChunks; ++c)
      tma_load_4d(query(w) + static_cast<uint32_t>(c * 64 * kSwizzleBytes), &params.maps.map[kQueryMap], full,
                  kSwizzleColumns * c, of.head, of.q_first + 64 * w, outer);
  }

  FKL_DEVICE void load_tile(Map map, int chunks, uint32_t to, uint32_t to_word, uint32_t full, uint32_t empty,
                            uint32_t parity, uint32_t word, int kv_head, int outer) const {
    mbarrier_wait(empty, parity ^ 1);
    store_shared_u32(to_word, word);
    mbarrier_arrive_expect_bytes(full, kKvTile * chunks * kSwizzleBytes);
    for (int c = 0; c < chunks; ++c)
      tma_load_4d(to + static_cast<uint32_t>(c * kKvTile * kSwizzleBytes), &params.maps.map[map], full,
                  kSwizzleColumns * c, kv_head, TileWord::tile(word) * kKvTile, outer);
  }
  FKL_DEVICE void load_key(TileRing* ring, uint32_t word, int kv_head, int outer, bool is_leader) const {
    const int s = ring->slot;
    if (is_leader)
      load_tile(kKeyMap, Shape::kHeadChunks, key(s), key_word(s), barrier(Shape::kKeyFull + s),
                barrier(Shape::kKeyEmpty + s), ring->parity, word, kv_head, outer);
    ring->advance();
  }
  FKL_DEVICE void load_value(TileRing* ring, uint32_t word, int kv_head, int outer, bool is_leader) const {
    const int s = ring->slot;
    if (is_leader)
      load_tile(kValueMap, Shape::kValueChunks, value(s), value_word(s), barrier(Shape::kValueFull + s),
                barrier(Shape::kValueEmpty + s), ring->parity, word, kv_head, outer);
    ring->advance();
  }

  FKL_DEVICE void produce() const {
    const CommonParams& common = params.common;
    const bool is_leader = elect_one();
    const QueryTileOrder<Element> order(common, kQTile);
    TileRing key_ring, value_ring;
    WorkRing works;
    uint32_t query_parity = 0;
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
      const int kv_head = index.head / (common.num_q_heads / common.num_kv_heads);
      Work& now = work(works.slot);
      mbarrier_wait(barrier(Shape::kWorkEmpty + works.slot), works.parity ^ 1);
      now.q_first = index.tile * kQTile;
      now.head = index.head;
      now.out_outer = map_outer(params.maps, kOutMap, outer);
      now.scores.bind(common, outer, index.head);
      now.lse = params.lse + (index.outer * common.num_q_heads + index.head) * common.q_seq_len;
      now.value = at_outer<const Element>(common.value, outer, kv_head);
      now.sink = -infinity();
      if constexpr (Config::kHasSinks) now.sink = __ldg(at_outer<const float>(common.sinks, outer) + index.head);
      __syncwarp();
      const Mask& mask = now.scores.mask;
      // Rows beyond q_end are not asked about: they must not make tiles mixed.
      const int q_first = now.q_first, q_last = min_int(q_first + kQTile, mask.q_end()) - 1;
      Walk walk(mask, q_first, q_last, 0, ceil_div(common.kv_seq_len, kKvTile), now.scores.grows());
      int tile = 0, state = kTileDead;
      bool has_tile = walk.next(mask, &tile, &state);
      now.num_tiles = has_tile ? 1 : 0;
      __syncwarp();
      if (is_leader) mbarrier_arrive(barrier(Shape::kWorkFull + works.slot));
      works.advance();

      if (has_tile) {
        const int key_outer = map_outer(params.maps, kKeyMap, outer);
        const int value_outer = map_outer(params.maps, kValueMap, outer);
        const int query_outer = map_outer(params.maps, kQueryMap, outer);
        // Keys run one tile ahead of values.
        uint32_t value_of = 0;
        bool is_first = true;
#pragma unroll 1
        while (has_tile) {
          int next_tile = 0, next_state = kTileDead;
          const bool has_next = walk.next(mask, &next_tile, &next_state);
          const uint32_t word = TileWord::of(tile, state, !has_next);
          if (is_first) load_query(now, 0, query_outer, query_parity, is_leader);
          load_key(&key_ring, word, kv_head, key_outer, is_leader);
          if (is_first) {
#pragma unroll
            for (int w = 1; w < kNumConsumers; ++w) load_query(now, w, query_outer, query_parity, is_leader);
            query_parity ^= 1;
          } else {
            load_value(&value_ring, value_of, kv_head, value_outer, is_leader);
          }
          is_first = false;
          value_of = word;
          tile = next_tile;
          state = next_state;
          has_tile = has_next;
        }
        load_value(&value_ring, value_of, kv_head, value_outer, is_leader);
      }
      item = __shfl_sync(0xffffffffu, next_item, __ffs(__ballot_sync(0xffffffffu, is_leader)) - 1);
    }
    if (Config::kIsPersistent && is_leader) {
      mbarrier_wait(barrier(Shape::kWorkEmpty + works.slot), works.parity ^ 1);
      work(works.slot).num_tiles = -1;
      mbarrier_arrive(barrier(Shape::kWorkFull + works.slot));
    }
    if (kGuardsValues && is_leader) {
      const int s = value_ring.slot;
      mbarrier_wait(barrier(Shape::kValueEmpty + s), value_ring.parity ^ 1);
      store_shared_u32(value_word(s), TileWord::kEnd);
      mbarrier_arrive(barrier(Shape::kValueFull + s));
    }
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
      if (word == TileWord::kEnd) return;
      if (word & TileWord::kMixed) {
        uint32_t low_rows = 0, high_rows = 0;
        // Groups of eight rows in turn: 1024 bytes in each chunk of columns.
#pragma unroll 1
        for (int turn = 0, group = checker; group < kKvTile / 8; ++turn, group += kNumCheckers) {
          const uint32_t first = value(s) + static_cast<uint32_t>(group * 8 * kSwizzleBytes);
          bool found = false;
#pragma unroll
          for (int c = 0; c < Shape::kValueChunks; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              found |= has_non_finite<Element>(load_shared_16(
                  first + static_cast<uint32_t>(c * kKvTile * kSwizzleBytes + (i * kWarpSize + lane) * kChunkBytes)));
          }
          if (!__any_sync(0xffffffffu, found)) continue;
          const uint32_t rows = clear_rows(first, lane) << (turn % 4 * 8);
          low_rows |= turn < 4 ? rows : 0;
          high_rows |= turn < 4 ? 0 : rows;
        }
        if (low_rows | high_rows) fence_proxy_async();
        if (lane == 0) store_shared_8(cleared(s) + static_cast<uint32_t>(8 * checker), low_rows, high_rows);
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
    const auto row_of = [&](int, int half) { return query_row(scores, q_first, me, half); };
    // Programs are long, and with them few tiles come here: one piece of code does for all.
    if (Scores::kHasExponent || (word & TileWord::kMixed)) {
      scores.template apply<true>(acc_s, row_of, first_key(me, word));
    } else {
      scores.template apply<false>(acc_s, row_of, first_key(me, word));
    }
  }
  FKL_DEVICE int query_row(const Scores& scores, int q_first, const Consumer& me, int half) const {
    return scores.clip_row(q_first + 64 * me.w + 16 * me.warp + 8 * half + me.lane / 4);
  }
  FKL_DEVICE int first_key(const Consumer& me, uint32_t word) const {
    return TileWord::tile(word) * kKvTile + 2 * (me.lane % 4);
  }

  // StaleSoftmax::try_exponentiate by the cheap form of the program. `*is_long`: that does not do here.
  template <bool kIsMixed>
  FKL_DEVICE bool exponentiate(const Scores& scores, int q_first, const Consumer& me,
                               const float (&acc_s)[1][kScoreTiles][4], uint32_t word,
                               Fragment (&probs)[kScoreTiles / 2], float (&total)[2], uint32_t zero,
                               bool* is_long) const {
    RunGuard guard;
    const auto row_of = [&](int, int half) { return query_row(scores, q_first, me, half); };
    const bool is_usable = me.softmax.template try_exponentiate<kScoreTiles>(
        probs, total,
        scores.template exponents<kIsMixed>(acc_s[0], row_of, first_key(me, word), me.softmax.row_max_log2, zero,
                                            guard));
    *is_long = guard.is_tripped();
    return is_usable && !*is_long;
  }

  // Adds the rows of values that the checkers cleared. Nothing is in flight.
  FKL_DEVICE void add_cleared(const Work& now, Consumer* me, float (&acc_o)[1][kOutTiles][4],
                              const Fragment (&probs)[1][kScoreTiles / 2], uint32_t word) const {
    const int s = me->value_ring.slot;
    mbarrier_wait(barrier(Shape::kValueChecked + s), me->checked_parity >> s & 1);
    me->checked_parity ^= 1u << s;
    const Chunk16 first = load_shared_16(cleared(s));
    const Chunk8 last = load_shared_8(cleared(s) + 16);
    if ((first.word[0] | first.word[1] | first.word[2] | first.word[3] | last.word[0] | last.word[1]) == 0) return;
#pragma unroll 1
    for (int i = 0; i < 2 * kNumCheckers; ++i) {
      uint32_t rows = load_shared_u32(cleared(s) + static_cast<uint32_t>(4 * i));
#pragma unroll 1
      for (; rows != 0; rows &= rows - 1) {
        const int bit = __ffs(static_cast<int>(rows)) - 1;
        const int row = ((i % 2 * 4 + bit / 8) * kNumCheckers + i / 2) * 8 + bit % 8;
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

  FKL_DEVICE void consume_tiles(const Work& now, Consumer* me, float (&acc_o)[1][kOutTiles][4]) const {
    // ptxas joins two sets of registers that a plain copy connects, and P of the next tile would be written while the
    // product reads P of this one (C7513, all in sequence). A zero that only the host knows keeps them apart.
    const uint32_t zero = static_cast<uint32_t>(params.num_splits - 1);
    const float to_log2 = now.scores.to_log2;
    Fragment probs[1][kScoreTiles / 2];
    mbarrier_wait(barrier(Shape::kQueryFull + me->w), me->query_parity);
    me->query_parity ^= 1;
    uint32_t word;
    {
      float acc_s[1][kScoreTiles][4];
      mbarrier_wait(barrier(Shape::kKeyFull + me->key_ring.slot), me->key_ring.parity);
      word = load_shared_u32(key_word(me->key_ring.slot));
      issue_scores(*me, acc_s[0]);
      const Scores scores = now.scores;
      const int q_first = now.q_first;
      wgmma_wait<0>();
      wgmma_touch(acc_s[0]);
      release(*me, Shape::kKeyEmpty, &me->key_ring);
      apply_scores(scores, q_first, *me, acc_s, word);
      float factor[2];
      me->softmax.update(probs[0], factor, acc_s[0], to_log2);
    }
    bool key_is_here = false, value_is_here = false;
    bool is_cheap = true;  // use the program's cheap form
#pragma unroll 1
    while (true) {
      if (kGuardsValues && (word & TileWord::kMixed)) add_cleared(now, me, acc_o, probs, word);
      if (word & TileWord::kLast) break;
      float acc_s[1][kScoreTiles][4];
      if (!key_is_here) mbarrier_wait(barrier(Shape::kKeyFull + me->key_ring.slot), me->key_ring.parity);
      word = load_shared_u32(key_word(me->key_ring.slot));
      take_turn(*me);
      issue_scores(*me, acc_s[0]);
      if (!value_is_here) mbarrier_wait(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
      issue_out(*me, acc_o[0], probs[0]);
      pass_turn(*me);
      // Read under the products; and once, the loops over elements would do it again and again.
      const Scores scores = now.scores;
      const int q_first = now.q_first;
      wgmma_wait<1>();
      wgmma_touch(acc_s[0]);
      release(*me, Shape::kKeyEmpty, &me->key_ring);
      Fragment next_probs[kScoreTiles / 2];
      float total[2];
      bool is_usable = false, is_long = false;
      if constexpr (Scores::kHasExponent) {
        total[0] = me->softmax.row_sum[0];
        total[1] = me->softmax.row_sum[1];
        if (!is_cheap) {
          // Done below by the program as it is written.
        } else if (word & TileWord::kMixed) {
          is_usable = exponentiate<true>(scores, q_first, *me, acc_s, word, next_probs, total, zero, &is_long);
        } else {
          is_usable = exponentiate<false>(scores, q_first, *me, acc_s, word, next_probs, total, zero, &is_long);
        }
      } else {
        apply_scores(scores, q_first, *me, acc_s, word);
        is_usable = me->softmax.try_exponentiate(next_probs, total, acc_s[0], to_log2);
      }
      keep_exponentials_here(total[0], total[1]);
      wgmma_wait<0>();
      wgmma_touch(acc_o[0]);
      release(*me, Shape::kValueEmpty, &me->value_ring);
      if (__any_sync(0xffffffffu, !is_usable)) {
        if constexpr (Scores::kHasExponent) {
          apply_scores(scores, q_first, *me, acc_s, word);
          // What does not do for one tile hardly does for the next.
          is_cheap = is_cheap && !__any_sync(0xffffffffu, is_long);
        }
        float factor[2];
        me->softmax.update(probs[0], factor, acc_s[0], to_log2);
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
      // Asked early, so that the answer's latency is over when it is needed.
      key_is_here = mbarrier_test(barrier(Shape::kKeyFull + me->key_ring.slot), me->key_ring.parity);
      value_is_here = mbarrier_test(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
    }
    if (Config::kIsPersistent && me->is_leader) mbarrier_arrive(barrier(Shape::kQueryEmpty + me->w));
    mbarrier_wait(barrier(Shape::kValueFull + me->value_ring.slot), me->value_ring.parity);
    issue_out(*me, acc_o[0], probs[0]);
    wgmma_wait<0>();
    wgmma_touch(acc_o[0]);
    release(*me, Shape::kValueEmpty, &me->value_ring);
  }

  FKL_DEVICE void store_out(const Work& now, Consumer* me, const float (&acc_o)[1][kOutTiles][4]) const {
    me->softmax.finish();
    float factor[2];
    bool is_empty[2];
    // Hidden: what follows from it is found here, not kept in registers since before the loop.
    const int lane = hidden(me->lane), first_row = hidden(16 * me->warp);
    const int q = now.q_first + 64 * me->w + first_row + lane / 4;
    const int q_end = now.scores.mask.q_end(), q_seq_len = params.common.q_seq_len;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowResult row = RowResult::of(me->softmax.row_max_log2[half], me->softmax.row_sum[half], now.sink);
      if (q + 8 * half >= q_end) {
        row.is_empty = true;
        row.lse = -infinity();
      }
      factor[half] = row.factor;
      is_empty[half] = row.is_empty;
      if (lane % 4 == 0 && q + 8 * half < q_seq_len) now.lse[q + 8 * half] = row.lse;
    }
    if (Shape::kHasOutBuffer) {  // the store before must have read it
      if (me->is_leader) bulk_wait_read<0>();
      named_barrier_sync(kStore + me->w, kWarpgroup);
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
      stmatrix_x4(out(me->w) + static_cast<uint32_t>(j / 4 * 64 * kSwizzleBytes + row * kSwizzleBytes +
                                                     (chunk ^ row % 8) * kChunkBytes),
                  packed(0), packed(1), packed(2), packed(3));
    }
    fence_proxy_async();
    named_barrier_sync(kStore + me->w, kWarpgroup);
    if (me->is_leader) {
#pragma unroll
      for (int c = 0; c < Shape::kValueChunks; ++c)
        tma_store_4d(&params.maps.map[kOutMap], out(me->w) + static_cast<uint32_t>(c * 64 * kSwizzleBytes),
                     kSwizzleColumns * c, now.head, now.q_first + 64 * me->w, now.out_outer);
      bulk_commit();
    }
  }

  FKL_DEVICE void consume(int w, int warp, int lane) const {
    Consumer me;
    me.w = w;
    me.warp = warp;
    me.lane = lane;
    me.is_leader = threadIdx.x % kWarpgroup == 0;
    WorkRing works;
    if (w == kNumConsumers - 1) named_barrier_arrive(kTurn, 2 * kWarpgroup);  // the first turn is warpgroup 0's
#pragma unroll 1
    do {
      mbarrier_wait(barrier(Shape::kWorkFull + works.slot), works.parity);
      const Work& now = work(works.slot);
      const int num_tiles = now.num_tiles;
      if (num_tiles < 0) break;
      float acc_o[1][kOutTiles][4];
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc_o[0][tile][i] = 0.0f;
      }
      me.softmax.clear();
      if (num_tiles > 0) consume_tiles(now, &me, acc_o);
      store_out(now, &me, acc_o);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier(Shape::kWorkEmpty + works.slot));
      works.advance();
    } while (Config::kIsPersistent);
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
      kernel.produce();
    } else if (Kernel::kGuardsValues) {
      kernel.check_values(warp - 1, lane);
    }
  } else {
    register_count_increase<Shape::kConsumerRegisters>();
    kernel.consume(warp / 4 - 1, warp % 4, lane);
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_KERNELS_FORWARD_SM90_CUH_
