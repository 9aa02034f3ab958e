// The range of the segment ids of every tile of keys of a call, in memory: the walks of all query tiles and heads look
// them up. All blocks find them together, when they begin. No block waits for one that has not started: a block takes
// tiles from a counter, and those that are taken are being looked at.
#ifndef FKL_DEVICE_ATTENTION_ID_RANGES_CUH_
#define FKL_DEVICE_ATTENTION_ID_RANGES_CUH_

#include "attention/outer.cuh"
#include "attention/params.cuh"
#include "attention/score_mask.cuh"
#include "core/ptx.cuh"

namespace fkl {

template <class Config, int kTile>
struct IdRanges {
  // Of zeroed memory; the first word belongs to the kernel. The ranges follow, kHeaderBytes from the start.
  enum Word { kTaken = 1, kFound };
  static constexpr int kHeaderBytes = 16;

  int* words;
  int num_tiles;  // of an outer element

  FKL_DEVICE IdRanges(const CommonParams& params, void* scratch)
      : words(static_cast<int*>(scratch)), num_tiles(ceil_div(params.kv_seq_len, kTile)) {}

  FKL_DEVICE IdRange* of(long long outer) const {
    return reinterpret_cast<IdRange*>(words + kHeaderBytes / 4) + outer * num_tiles;
  }

  // By one warp of each block. Afterwards all ranges may be read.
  FKL_DEVICE void find(const CommonParams& params) const {
    const int size = static_cast<int>(params.num_outer) * num_tiles;
    if (__all_sync(0xffffffffu, load_acquire(words + kFound) == size)) return;
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int step = max_i32(1, size / (4 * static_cast<int>(gridDim.x)));
#pragma unroll 1
    while (true) {
      int first = 0;
      if (lane == 0) first = atomicAdd(words + kTaken, step);
      first = __shfl_sync(0xffffffffu, first, 0);
      if (first >= size) break;
      const int last = min_i32(first + step, size);
#pragma unroll 1
      for (int i = first; i < last; ++i) {
        const OuterIndex outer = outer_index(params, i / num_tiles);
        const int begin = i % num_tiles * kTile;
        int end = min_i32(begin + kTile, params.kv_seq_len);
        if constexpr (Config::kHasKvLengths) end = min_i32(end, int_or(params.kv_seq_lengths, outer, end));
        const IdRange range = warp_id_range(at_outer<const int>(params.kv_segment_ids, outer), begin, end - 1);
        if (lane == 0) of(0)[i] = range;
      }
      if (lane == 0) reduce_add_release(words + kFound, last - first);
    }
    while (load_acquire(words + kFound) != size) {
    }
    __syncwarp();
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_ID_RANGES_CUH_
