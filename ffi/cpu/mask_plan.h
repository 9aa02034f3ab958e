// Which tiles of the score matrix are live, and which elements of the mixed ones: the AND of the
// mask program, segment ids, block mask and lengths, decided without looking at the elements of
// tiles that are wholly live or dead.
#ifndef FKL_FFI_CPU_MASK_PLAN_H_
#define FKL_FFI_CPU_MASK_PLAN_H_

#include <cstdint>
#include <vector>

#include "cpu/attention_cpu.h"

namespace fkl {

// Query rows q_begin... of several heads against keys kv_begin..., local indices, of one outer
// element.
struct TileRect {
  int64_t outer;
  int first_head, num_heads;
  int64_t q_begin, num_q;
  int64_t kv_begin, num_kv;
};

// Sources that are neither all live nor all dead in a tile.
enum MaskSource : unsigned { kMixedProgram = 1, kMixedSegments = 2, kMixedBlocks = 4, kMixedTail = 8 };

struct LiveTile {
  int64_t index;   // along the line of tiles
  unsigned mixed;  // MaskSource bits; 0: every element is live
  int begin, end;  // the part of the tile that this is about; the rest of the tile is dead or is another entry
};

class MaskPlan {
 public:
  // Reads the segment ids once: O(T + S).
  explicit MaskPlan(const AttentionProblem& problem);

  // The live tiles among those that cut `rect` along the keys (queries) into pieces of `tile`, in
  // order. Key tiles in which a block mask leaves the same keys to all queries are cut to these keys.
  void LiveKeyTiles(const TileRect& rect, int tile, std::vector<LiveTile>* tiles) const;
  void LiveQueryTiles(const TileRect& rect, int tile, std::vector<LiveTile>* tiles) const;

  // The bits and the range of every row (head by head) of a mixed tile of at most kRowWidth keys;
  // zero_begin and zero_end are left alone. `runner` has its captures bound; it may be null without
  // a mask program.
  void FillRows(const TileRect& rect, unsigned mixed, ProgramRunner* runner, TileRow* rows) const;

 private:
  enum class Axis { kQuery, kKey };
  struct Range {  // of the segment ids of a block of positions
    int32_t min, max;
  };
  static constexpr int64_t kSegmentBlock = 32;

  static std::vector<Range> SegmentRanges(const Operand& ids, int64_t num_outer, int64_t length);
  void LiveTiles(const TileRect& rect, Axis axis, int tile, std::vector<LiveTile>* tiles) const;
  void Bisect(const TileRect& rect, Axis axis, int tile, int64_t begin, int64_t end, bool program_is_live,
              std::vector<LiveTile>* tiles) const;
  Liveness ClassifyProgram(const TileRect& rect) const;
  Liveness ClassifySegments(const TileRect& rect) const;
  Liveness ClassifyBlocks(const TileRect& rect) const;
  bool SharesBlocks(const TileRect& rect) const;
  void PushRuns(const TileRect& part, int64_t index, unsigned mixed, std::vector<LiveTile>* tiles) const;
  void AndBlocks(const TileRect& rect, int head, int64_t q, uint32_t* bits) const;

  const AttentionProblem& problem_;
  std::vector<Range> q_ranges_, kv_ranges_;  // [outer][block]
};

// Rows of a tile that a register block takes together: their common range and the columns that are
// live in any.
struct Strip {
  int begin, end;  // live columns are in [begin, end); equal: the strip is dead
  uint32_t bits[kRowWidth / 32];
};
// Also sets the rows' zero_begin and zero_end to the strip's range, widened to even columns.
void FillStrips(TileRow* rows, int num_rows, int strip_rows, Strip* strips);

// Whether any column of [begin, begin + count) is set; count divides 32 and begin is a multiple of
// it.
inline bool AnyBit(const uint32_t* bits, int begin, int count) {
  const uint32_t word = bits[begin / 32] >> (begin % 32);
  return count == 32 ? word != 0 : (word & ((uint32_t{1} << count) - 1)) != 0;
}

}  // namespace fkl

#endif  // FKL_FFI_CPU_MASK_PLAN_H_
