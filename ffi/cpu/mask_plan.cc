#include "cpu/mask_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace fkl {
namespace {

constexpr int kWords = kRowWidth / 32;

void ClearBits(uint32_t* bits, int begin, int end) {
  for (int word = begin / 32; word * 32 < end; ++word) {
    const int from = std::max(begin - word * 32, 0), to = std::min(end - word * 32, 32);
    const uint32_t ones = to - from == 32 ? ~uint32_t{0} : ((uint32_t{1} << (to - from)) - 1) << from;
    bits[word] &= ~ones;
  }
}

void FindRange(const uint32_t* bits, int* begin, int* end) {
  int first = 0, last = kWords - 1;
  while (first < kWords && bits[first] == 0) ++first;
  if (first == kWords) {
    *begin = *end = 0;
    return;
  }
  while (bits[last] == 0) --last;
  *begin = first * 32 + std::countr_zero(bits[first]);
  *end = last * 32 + 32 - std::countl_zero(bits[last]);
}

}  // namespace

TileCounts& GlobalTileCounts() {
  static TileCounts counts;
  return counts;
}

std::vector<MaskPlan::Range> MaskPlan::SegmentRanges(const Operand& ids, int64_t num_outer, int64_t length) {
  std::vector<Range> ranges;
  ranges.reserve(static_cast<size_t>(num_outer * ((length + kSegmentBlock - 1) / kSegmentBlock)));
  for (int64_t outer = 0; outer < num_outer; ++outer) {
    const int32_t* values = ids.At<int32_t>(outer);
    for (int64_t begin = 0; begin < length; begin += kSegmentBlock) {
      const auto [min, max] = std::minmax_element(values + begin, values + std::min(begin + kSegmentBlock, length));
      ranges.push_back({*min, *max});
    }
  }
  return ranges;
}

MaskPlan::MaskPlan(const AttentionProblem& problem) : problem_(problem) {
  if (problem.q_segment_ids) {
    q_ranges_ = SegmentRanges(problem.q_segment_ids, problem.num_outer(), problem.q_seq_len);
    kv_ranges_ = SegmentRanges(problem.kv_segment_ids, problem.num_outer(), problem.kv_seq_len);
  }
}

Liveness MaskPlan::ClassifyProgram(const TileRect& rect) const {
  const AttentionProblem& p = problem_;
  int32_t first_head = p.GlobalHead(rect.outer, rect.first_head), last_head = first_head;
  for (int head = 1; head < rect.num_heads; ++head) {
    const int32_t global = p.GlobalHead(rect.outer, rect.first_head + head);
    first_head = std::min(first_head, global);
    last_head = std::max(last_head, global);
  }
  const int32_t b = p.GlobalBatch(rect.outer);
  return p.mask.Classify(
      p.CapturesOf(rect.outer), {b, b}, {first_head, last_head},
      {p.GlobalQuery(rect.outer, rect.q_begin), p.GlobalQuery(rect.outer, rect.q_begin + rect.num_q - 1)},
      {p.GlobalKey(rect.outer, rect.kv_begin), p.GlobalKey(rect.outer, rect.kv_begin + rect.num_kv - 1)});
}

Liveness MaskPlan::ClassifySegments(const TileRect& rect) const {
  const auto range = [&](const std::vector<Range>& ranges, int64_t length, int64_t begin, int64_t count) {
    const int64_t blocks = (length + kSegmentBlock - 1) / kSegmentBlock;
    const Range* block = ranges.data() + rect.outer * blocks;
    Range all = block[begin / kSegmentBlock];
    for (int64_t i = begin / kSegmentBlock; i <= (begin + count - 1) / kSegmentBlock; ++i) {
      all = {std::min(all.min, block[i].min), std::max(all.max, block[i].max)};
    }
    return all;
  };
  const Range q = range(q_ranges_, problem_.q_seq_len, rect.q_begin, rect.num_q);
  const Range kv = range(kv_ranges_, problem_.kv_seq_len, rect.kv_begin, rect.num_kv);
  if (q.max < kv.min || kv.max < q.min || q.max < 0 || kv.max < 0) return Liveness::kNone;
  if (q.min == q.max && kv.min == kv.max) return Liveness::kAll;  // equal, as they overlap, and not negative
  return Liveness::kMixed;
}

Liveness MaskPlan::ClassifyBlocks(const TileRect& rect) const {
  const AttentionProblem& p = problem_;
  const int64_t q_first = rect.q_begin / p.block_q, q_last = (rect.q_begin + rect.num_q - 1) / p.block_q;
  const int64_t kv_first = rect.kv_begin / p.block_kv, kv_last = (rect.kv_begin + rect.num_kv - 1) / p.block_kv;
  const int num_heads = p.block_mask_strides.head ? rect.num_heads : 1;
  bool any_live = false, any_dead = false;
  for (int head = rect.first_head; head < rect.first_head + num_heads; ++head) {
    const uint8_t* blocks = p.block_mask.At<uint8_t>(rect.outer) + head * p.block_mask_strides.head;
    for (int64_t q = q_first; q <= q_last; ++q) {
      for (int64_t kv = kv_first; kv <= kv_last; ++kv) {
        (blocks[q * p.block_mask_strides.row + kv] ? any_live : any_dead) = true;
      }
      if (any_live && any_dead) return Liveness::kMixed;
    }
  }
  return any_live ? Liveness::kAll : Liveness::kNone;
}

// Whether all rows see the same blocks, with bounds at which packed keys may be cut.
bool MaskPlan::SharesBlocks(const TileRect& rect) const {
  const AttentionProblem& p = problem_;
  return p.block_kv % p.isa->panel_width == 0 && rect.kv_begin % p.block_kv == 0 &&
         (rect.num_heads == 1 || p.block_mask_strides.head == 0) &&
         rect.q_begin / p.block_q == (rect.q_begin + rect.num_q - 1) / p.block_q;
}

// The runs of live blocks of a key tile.
void MaskPlan::PushRuns(const TileRect& part, int64_t index, unsigned mixed, std::vector<LiveTile>* tiles) const {
  const AttentionProblem& p = problem_;
  const uint8_t* blocks = p.block_mask.At<uint8_t>(part.outer) + part.first_head * p.block_mask_strides.head +
                          part.q_begin / p.block_q * p.block_mask_strides.row + part.kv_begin / p.block_kv;
  const int64_t num_blocks = (part.num_kv + p.block_kv - 1) / p.block_kv;
  for (int64_t begin = 0; begin < num_blocks;) {
    if (!blocks[begin]) {
      ++begin;
      continue;
    }
    int64_t end = begin + 1;
    while (end < num_blocks && blocks[end]) ++end;
    const auto first = static_cast<int>(begin * p.block_kv);
    const auto last = static_cast<int>(std::min(end * p.block_kv, part.num_kv));
    const bool has_tail = (last - first) % p.isa->vector_width != 0;
    tiles->push_back({index, mixed | (has_tail ? unsigned{kMixedTail} : 0u), first, last});
    begin = end;
  }
}

void MaskPlan::Bisect(const TileRect& rect, Axis axis, int tile, int64_t begin, int64_t end, bool program_is_live,
                      std::vector<LiveTile>* tiles) const {
  const bool is_key = axis == Axis::kKey;
  TileRect part = rect;
  int64_t& part_begin = is_key ? part.kv_begin : part.q_begin;
  int64_t& part_size = is_key ? part.num_kv : part.num_q;
  const int64_t size = part_size;
  part_begin += begin * tile;
  part_size = std::min(end * tile, size) - begin * tile;
  Liveness program = Liveness::kAll;
  if (!program_is_live) program = ClassifyProgram(part);
  if (program == Liveness::kNone) return;
  if (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    Bisect(rect, axis, tile, begin, middle, program == Liveness::kAll, tiles);
    Bisect(rect, axis, tile, middle, end, program == Liveness::kAll, tiles);
    return;
  }
  unsigned mixed = 0;
  if (program == Liveness::kMixed) mixed |= kMixedProgram;
  if (problem_.q_segment_ids) {
    const Liveness segments = ClassifySegments(part);
    if (segments == Liveness::kNone) return;
    if (segments == Liveness::kMixed) mixed |= kMixedSegments;
  }
  if (problem_.block_mask) {
    const Liveness blocks = ClassifyBlocks(part);
    if (blocks == Liveness::kNone) return;
    if (blocks == Liveness::kMixed && is_key && SharesBlocks(part)) return PushRuns(part, begin, mixed, tiles);
    if (blocks == Liveness::kMixed) mixed |= kMixedBlocks;
  }
  if (part.num_kv % problem_.isa->vector_width != 0) mixed |= kMixedTail;
  tiles->push_back({begin, mixed, 0, static_cast<int>(part_size)});
}

void MaskPlan::LiveTiles(const TileRect& rect, Axis axis, int tile, std::vector<LiveTile>* tiles) const {
  tiles->clear();
  if (rect.num_q <= 0 || rect.num_kv <= 0) return;
  const int64_t size = axis == Axis::kKey ? rect.num_kv : rect.num_q;
  const int64_t count = (size + tile - 1) / tile;
  Bisect(rect, axis, tile, 0, count, problem_.mask.empty(), tiles);
  int64_t num_live = 0, num_mixed = 0, last = -1;
  for (const LiveTile& t : *tiles) {  // a tile cut to less counts as mixed
    if (t.index == last) continue;
    last = t.index;
    ++num_live;
    if (t.mixed != 0 || t.end - t.begin < std::min<int64_t>(tile, size - t.index * tile)) ++num_mixed;
  }
  TileCounts& counts = GlobalTileCounts();
  counts.full.fetch_add(num_live - num_mixed, std::memory_order_relaxed);
  counts.mixed.fetch_add(num_mixed, std::memory_order_relaxed);
  counts.dead.fetch_add(count - num_live, std::memory_order_relaxed);
}

void MaskPlan::LiveKeyTiles(const TileRect& rect, int tile, std::vector<LiveTile>* tiles) const {
  LiveTiles(rect, Axis::kKey, tile, tiles);
}

void MaskPlan::LiveQueryTiles(const TileRect& rect, int tile, std::vector<LiveTile>* tiles) const {
  LiveTiles(rect, Axis::kQuery, tile, tiles);
}

// Clears the columns of dead blocks, one range per block column.
void MaskPlan::AndBlocks(const TileRect& rect, int head, int64_t q, uint32_t* bits) const {
  const AttentionProblem& p = problem_;
  const uint8_t* blocks = p.block_mask.At<uint8_t>(rect.outer) + head * p.block_mask_strides.head +
                          q / p.block_q * p.block_mask_strides.row;
  const int64_t kv_end = rect.kv_begin + rect.num_kv;
  for (int64_t block = rect.kv_begin / p.block_kv; block * p.block_kv < kv_end; ++block) {
    if (blocks[block]) continue;
    const int64_t from = std::max(block * p.block_kv, rect.kv_begin), to = std::min((block + 1) * p.block_kv, kv_end);
    ClearBits(bits, static_cast<int>(from - rect.kv_begin), static_cast<int>(to - rect.kv_begin));
  }
}

void MaskPlan::FillRows(const TileRect& rect, unsigned mixed, ProgramRunner* runner, TileRow* rows) const {
  const AttentionProblem& p = problem_;
  const int num_kv = static_cast<int>(rect.num_kv);
  const auto kv_idx0 = static_cast<int32_t>(p.GlobalKey(rect.outer, rect.kv_begin));
  const int32_t* q_segments = p.q_segment_ids ? p.q_segment_ids.At<int32_t>(rect.outer) : nullptr;
  const int32_t* kv_segments = p.kv_segment_ids ? p.kv_segment_ids.At<int32_t>(rect.outer) + rect.kv_begin : nullptr;
  for (int head = rect.first_head; head < rect.first_head + rect.num_heads; ++head) {
    if (mixed & kMixedProgram) runner->BindHead(p.GlobalBatch(rect.outer), p.GlobalHead(rect.outer, head));
    for (int64_t q = rect.q_begin; q < rect.q_begin + rect.num_q; ++q, ++rows) {
      if (mixed & kMixedProgram) {
        runner->BindRow(static_cast<int32_t>(p.GlobalQuery(rect.outer, q)));
        runner->RunMask(kv_idx0, num_kv, rows->bits);
      } else {
        std::memset(rows->bits, 0xff, sizeof rows->bits);
        ClearBits(rows->bits, num_kv, kRowWidth);
      }
      if (mixed & kMixedSegments) {
        if (q_segments[q] < 0) {
          std::memset(rows->bits, 0, sizeof rows->bits);
        } else {
          p.isa->and_equal_bits(kv_segments, q_segments[q], num_kv, rows->bits);
        }
      }
      if (mixed & kMixedBlocks) AndBlocks(rect, head, q, rows->bits);
      FindRange(rows->bits, &rows->begin, &rows->end);
      rows->begin = rows->begin / 16 * 16;
    }
  }
}

void FillStrips(TileRow* rows, int num_rows, int strip_rows, Strip* strips) {
  for (int begin = 0; begin < num_rows; begin += strip_rows, ++strips) {
    const int end = std::min(begin + strip_rows, num_rows);
    std::memset(strips->bits, 0, sizeof strips->bits);
    for (int row = begin; row < end; ++row) {
      for (int word = 0; word < kWords; ++word) strips->bits[word] |= rows[row].bits[word];
    }
    FindRange(strips->bits, &strips->begin, &strips->end);
    strips->begin = strips->begin / 2 * 2;
    strips->end = (strips->end + 1) / 2 * 2;
    for (int row = begin; row < end; ++row) {
      rows[row].zero_begin = strips->begin;
      rows[row].zero_end = strips->end;
    }
  }
}

}  // namespace fkl
