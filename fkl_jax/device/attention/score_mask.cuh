// Which scores are live: bounds of the arrays, lengths, segment ids, block mask and mask program,
// for elements and for tiles.
//
// Indices are local (rows of the arrays); the offsets are added in here, for the program only. A
// tile is dead if no element of it is live, live if all are, and mixed if that is not known: only
// mixed tiles look at elements.
#ifndef FKL_DEVICE_ATTENTION_SCORE_MASK_CUH_
#define FKL_DEVICE_ATTENTION_SCORE_MASK_CUH_

#include "attention/mods.cuh"
#include "attention/outer.cuh"
#include "attention/params.cuh"

namespace fkl {

// n / divisor for 0 <= n < 2^31 by one multiplication: with 2^l >= divisor > 2^(l-1) and m =
// floor(2^(31+l) / divisor) + 1, n m / 2^(31+l) exceeds n / divisor by less than 1 / divisor.
struct FastDivisor {
  unsigned magic;
  int shift;

  static FKL_DEVICE FastDivisor of(int divisor) {
    const int shift = divisor <= 1 ? 0 : 32 - __clz(divisor - 1);
    return {static_cast<unsigned>((1ull << (31 + shift)) / static_cast<unsigned>(divisor)) + 1u,
            shift};
  }
  FKL_DEVICE int divide(int n) const {
    return static_cast<int>(__umulhi(2u * static_cast<unsigned>(n), magic) >> shift);
  }
};

// The smallest and the largest of some segment ids. Ids are in no particular order.
struct IdRange {
  int low, high;

  FKL_DEVICE int classify(IdRange other) const {
    // Negative ids are live with nothing, not even with themselves.
    if (high < other.low || other.high < low || high < 0 || other.high < 0) return kTileDead;
    return low == high && other.low == other.high ? kTileLive : kTileMixed;
  }
};

// Every lane gets the range of ids first .. last.
FKL_DEVICE IdRange warp_id_range(const int* ids, int first, int last) {
  IdRange range{0x7fffffff, -0x7fffffff - 1};
#pragma unroll 2
  for (int i = first + (static_cast<int>(threadIdx.x) & 31); i <= last; i += 32) {
    const int id = __ldg(ids + i);
    range.low = min_i32(range.low, id);
    range.high = max_i32(range.high, id);
  }
  return {__reduce_min_sync(0xffffffffu, range.low), __reduce_max_sync(0xffffffffu, range.high)};
}

template <class ConfigType, class MaskMod>
struct ScoreMask {
  using Config = ConfigType;
  // Tiles are classified without looking at anything but the ends.
  static constexpr bool kIsBoundsOnly =
      MaskMod::kIsIdentity && !Config::kHasSegmentIds && !Config::kHasBlockMask;
  static constexpr bool kIsTrivial =
      kIsBoundsOnly && !Config::kHasQLengths && !Config::kHasKvLengths;

  struct Row {
    typename MaskMod::Row mod;
    const unsigned char* blocks;
    int segment_id;
    int kv_end;  // 0: the row is dead
  };

  FKL_DEVICE void bind(const CommonParams& params, const OuterIndex& outer, int head) {
    q_end_ = params.q_seq_len;
    kv_end_ = params.kv_seq_len;
    if constexpr (Config::kHasQLengths)
      q_end_ = clip(int_or(params.q_seq_lengths, outer, q_end_), q_end_);
    if constexpr (Config::kHasKvLengths)
      kv_end_ = clip(int_or(params.kv_seq_lengths, outer, kv_end_), kv_end_);
    if constexpr (Config::kHasSegmentIds) {
      q_segment_ids_ = at_outer<const int>(params.q_segment_ids, outer);
      kv_segment_ids_ = at_outer<const int>(params.kv_segment_ids, outer);
    }
    if constexpr (Config::kHasBlockMask) {
      blocks_ = at_outer<const unsigned char>(params.block_mask, outer, head);
      blocks_row_stride_ = params.block_mask.row_stride;
      block_q_ = FastDivisor::of(params.block_q);
      block_kv_ = FastDivisor::of(params.block_kv);
    }
    if constexpr (!MaskMod::kIsIdentity) {
      q_offset_ = int_or(params.q_offset, outer, 0);
      kv_offset_ = int_or(params.kv_offset, outer, 0);
      mod_ = MaskMod::bind(params, outer);
      head_ = mod_.bind_head(global_batch(params, outer), global_head(params, outer, head));
    }
  }

  // Rows and keys from here on are dead.
  FKL_DEVICE int q_end() const { return q_end_; }
  FKL_DEVICE int kv_end() const { return kv_end_; }

  // Rows and keys first .. last inclusive. One lane's work: any lane may ask about any tile.
  FKL_DEVICE int classify(int q_first, int q_last, int kv_first, int kv_last) const {
    const int state = classify_without_ids(q_first, q_last, kv_first, kv_last);
    if constexpr (Config::kHasSegmentIds) {
      if (state != kTileDead) {
        const int by_ids =
            id_range(q_segment_ids_, q_first, min_i32(q_last, q_end_ - 1))
                .classify(id_range(kv_segment_ids_, kv_first, min_i32(kv_last, kv_end_ - 1)));
        return min_i32(state, by_ids);
      }
    }
    return state;
  }

  FKL_DEVICE Row bind_row(int q) const {
    Row row{};
    if (q >= q_end_) return row;
    row.kv_end = kv_end_;
    if constexpr (Config::kHasSegmentIds) {
      row.segment_id = __ldg(q_segment_ids_ + q);
      if (row.segment_id < 0) row.kv_end = 0;
    }
    if constexpr (Config::kHasBlockMask)
      row.blocks = blocks_ + block_q_.divide(q) * blocks_row_stride_;
    if constexpr (!MaskMod::kIsIdentity) row.mod = mod_.bind_row(head_, wrapping_add(q, q_offset_));
    return row;
  }

  FKL_DEVICE bool live(const Row& row, int, int kv) const {
    bool is_live = kv < row.kv_end;
    // What reads memory only looks inside the arrays; loads of a program clamp by themselves.
    if constexpr (Config::kHasSegmentIds)
      is_live = is_live && __ldg(kv_segment_ids_ + kv) == row.segment_id;
    if constexpr (Config::kHasBlockMask)
      is_live = is_live && __ldg(row.blocks + block_kv_.divide(kv)) != 0;
    // Not `&&`: a branch, or what the compiler makes of it, costs more than most programs.
    if constexpr (!MaskMod::kIsIdentity)
      is_live = is_live & mod_.live(head_, row.mod, wrapping_add(kv, kv_offset_));
    return is_live;
  }

  // ---- for TileWalk

  FKL_DEVICE int classify_without_ids(int q_first, int q_last, int kv_first, int kv_last) const {
    if (q_first >= q_end_ || kv_first >= kv_end_) return kTileDead;
    int state = q_last < q_end_ && kv_last < kv_end_ ? kTileLive : kTileMixed;
    q_last = min_i32(q_last, q_end_ - 1);
    kv_last = min_i32(kv_last, kv_end_ - 1);
    if constexpr (!MaskMod::kIsIdentity) {
      const int q_low = wrapping_add(q_first, q_offset_), q_high = wrapping_add(q_last, q_offset_);
      const int kv_low = wrapping_add(kv_first, kv_offset_),
                kv_high = wrapping_add(kv_last, kv_offset_);
      // Indices that wrap inside a tile are no interval.
      state = min_i32(state, q_low > q_high || kv_low > kv_high
                                 ? kTileMixed
                                 : mod_.classify(head_, q_low, q_high, kv_low, kv_high));
    }
    if constexpr (Config::kHasBlockMask) {
      if (state != kTileDead)
        state = min_i32(state, classify_blocks(q_first, q_last, kv_first, kv_last));
    }
    return state;
  }
  FKL_DEVICE const int* q_segment_ids() const { return q_segment_ids_; }
  FKL_DEVICE const int* kv_segment_ids() const { return kv_segment_ids_; }

 private:
  static FKL_DEVICE int clip(int length, int size) { return min_i32(max_i32(length, 0), size); }

  static FKL_DEVICE IdRange id_range(const int* ids, int first, int last) {
    IdRange range{0x7fffffff, -0x7fffffff - 1};
    for (int i = first; i <= last; ++i) {
      const int id = __ldg(ids + i);
      range.low = min_i32(range.low, id);
      range.high = max_i32(range.high, id);
    }
    return range;
  }

  FKL_DEVICE int classify_blocks(int q_first, int q_last, int kv_first, int kv_last) const {
    const int kv_block_first = block_kv_.divide(kv_first),
              kv_block_last = block_kv_.divide(kv_last);
    const int q_block_last = block_q_.divide(q_last);
    bool any_live = false, any_dead = false;
    for (int q_block = block_q_.divide(q_first); q_block <= q_block_last; ++q_block) {
      const unsigned char* row = blocks_ + q_block * blocks_row_stride_;
      for (int kv_block = kv_block_first; kv_block <= kv_block_last; ++kv_block) {
        const bool is_live = __ldg(row + kv_block) != 0;
        any_live |= is_live;
        any_dead |= !is_live;
      }
    }
    return !any_live ? kTileDead : any_dead ? kTileMixed : kTileLive;
  }

  int q_end_, kv_end_;
  // Members of absent sources are never set nor read, so they take no register.
  const int *q_segment_ids_, *kv_segment_ids_;
  const unsigned char* blocks_;
  long long blocks_row_stride_;
  FastDivisor block_q_, block_kv_;
  int q_offset_, kv_offset_;
  MaskMod mod_;
  typename MaskMod::Head head_;
};

// Goes through the tiles of the other side that are not dead, ascending (or descending). Warp-uniform: all lanes of
// a warp call it together, and every warp of a block finds the same. `kTilesAreKeys`: the fixed
// tile is one of queries (fixed_first .. fixed_last inclusive) and it goes through tiles of keys,
// else the other way round.
//
// 32 tiles are classified at once, one by each lane; a tile then costs a few instructions, whatever
// the mask.
template <class Mask, int kQTile, int kKvTile, bool kTilesAreKeys>
struct TileWalk {
  static constexpr int kTile = kTilesAreKeys ? kKvTile : kQTile;

  FKL_DEVICE TileWalk(const Mask& mask, int fixed_first, int fixed_last, int tile_begin,
                      int tile_end, bool descends = false)
      : descends_(descends),
        fixed_first_(fixed_first),
        fixed_last_(fixed_last),
        next_(tile_begin),
        end_(tile_end),
        present_(0),
        mixed_(0) {
    const int fixed_end = kTilesAreKeys ? mask.q_end() : mask.kv_end();
    const int size = kTilesAreKeys ? mask.kv_end() : mask.q_end();
    const int last = fixed_first < fixed_end ? (size + kTile - 1) / kTile : 0;
    end_ = min_i32(end_, last);
    if constexpr (Mask::Config::kHasSegmentIds) {
      fixed_ids_ = warp_id_range(kTilesAreKeys ? mask.q_segment_ids() : mask.kv_segment_ids(),
                                 fixed_first, min_i32(fixed_last, fixed_end - 1));
      if (fixed_ids_.high < 0) end_ = next_;
    }
  }

  // False: no tile is left. `state` is kTileMixed or kTileLive.
  FKL_DEVICE bool next(const Mask& mask, int* tile, int* state) {
    if constexpr (Mask::kIsBoundsOnly) {
      if (next_ >= end_) return false;
      *tile = descends_ ? --end_ : next_++;
      *state = classify(mask, *tile);
      return true;
    } else {
      while (present_ == 0) {
        if (next_ >= end_) return false;
        classify_group(mask);
      }
      const int present = static_cast<int>(present_);
      const int lane = descends_ ? 31 - __clz(present) : __ffs(present) - 1;
      *tile = (descends_ ? end_ : next_ - 32) + lane;
      *state = (mixed_ >> lane) & 1u ? kTileMixed : kTileLive;
      present_ ^= 1u << lane;
      return true;
    }
  }

 private:
  FKL_DEVICE int classify(const Mask& mask, int tile) const {
    const int first = tile * kTile, last = first + kTile - 1;
    return kTilesAreKeys ? mask.classify_without_ids(fixed_first_, fixed_last_, first, last)
                         : mask.classify_without_ids(first, last, fixed_first_, fixed_last_);
  }

  // Tiles next_ .. next_ + 31, or end_ - 32 .. end_ - 1.
  FKL_DEVICE void classify_group(const Mask& mask) {
    const int first_tile = descends_ ? end_ - 32 : next_;
    const int tile = first_tile + (static_cast<int>(threadIdx.x) & 31);
    const int state = next_ <= tile && tile < end_ ? classify(mask, tile) : kTileDead;
    present_ = __ballot_sync(0xffffffffu, state != kTileDead);
    mixed_ = __ballot_sync(0xffffffffu, state == kTileMixed);
    if constexpr (Mask::Config::kHasSegmentIds) {
      const int* ids = kTilesAreKeys ? mask.kv_segment_ids() : mask.q_segment_ids();
      const int size = kTilesAreKeys ? mask.kv_end() : mask.q_end();
      // The warp together looks at the ids of one tile after the other: its reads are contiguous.
      for (unsigned rest = present_; rest != 0; rest &= rest - 1u) {
        const unsigned bit = rest & (0u - rest);
        const int first = (first_tile + __ffs(static_cast<int>(rest)) - 1) * kTile;
        const int by_ids =
            fixed_ids_.classify(warp_id_range(ids, first, min_i32(first + kTile, size) - 1));
        if (by_ids == kTileDead) present_ &= ~bit;
        if (by_ids != kTileLive) mixed_ |= bit;
      }
    }
    (descends_ ? end_ : next_) += descends_ ? -32 : 32;
  }

  bool descends_;
  int fixed_first_, fixed_last_;
  int next_, end_;
  unsigned present_, mixed_;  // of tiles next_ - 32 .. next_ - 1, or end_ .. end_ + 31
  IdRange fixed_ids_;
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_SCORE_MASK_CUH_
