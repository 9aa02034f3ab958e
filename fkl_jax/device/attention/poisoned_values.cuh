// Values that are NaN or infinite under a mask: P = 0 of a dead element must not meet them, 0 * NaN is NaN.
//
// In mixed tiles the rows of V are looked at. Those with such an element are cleared in shared memory before the matrix
// product, and added afterwards one by one to the rows whose P is not 0. The look costs a few instructions per chunk,
// the rest happens only if something is found.
#ifndef FKL_DEVICE_ATTENTION_POISONED_VALUES_CUH_
#define FKL_DEVICE_ATTENTION_POISONED_VALUES_CUH_

#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/layout.cuh"

namespace fkl {

template <class Element>
FKL_DEVICE bool has_non_finite(const Chunk16& chunk) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4) {
      found |= (chunk.word[i] & 0x7f800000u) == 0x7f800000u;
    } else {
      constexpr uint32_t kExponent = IsSame<Element, BFloat16>::kValue ? 0x7f80u : 0x7c00u;
      found |= (chunk.word[i] & kExponent) == kExponent || (chunk.word[i] & kExponent << 16) == kExponent << 16;
    }
  }
  return found;
}

// `kThreads` threads share a tile of values (a warp or a block).
template <class Tile, int kThreads>
struct PoisonedValues {
  using Element = typename Tile::Element;

  // Does this thread's part of the tile hold a NaN or infinity?
  static FKL_DEVICE bool find(uint32_t tile, int thread) {
    constexpr int kChunkCount = Tile::kRows * Tile::kChunks;
    bool found = false;
#pragma unroll 4
    for (int index = thread; index < kChunkCount; index += kThreads)
      found |= has_non_finite<Element>(load_shared_16(tile + static_cast<uint32_t>(index * kChunkBytes)));
    return found;
  }

  // By one warp: clears such rows first, first + step, ... Bit r of the result: row first + r * step was cleared.
  static FKL_DEVICE uint32_t clear(uint32_t tile, int first, int step, int lane) {
    uint32_t cleared = 0;
    for (int row = first; row < Tile::kRows; row += step) {
      bool found = false;
      for (int chunk = lane; chunk < Tile::kChunks; chunk += kWarpSize)
        found |= has_non_finite<Element>(load_shared_16(address(tile, row, chunk)));
      if (!__any_sync(0xffffffffu, found)) continue;
      for (int chunk = lane; chunk < Tile::kChunks; chunk += kWarpSize)
        store_shared_16(address(tile, row, chunk), Chunk16{{0, 0, 0, 0}});
      cleared |= 1u << (row / step);
    }
    return cleared;
  }

  // acc_o += P[:, key] * value for the warp's rows whose P is not 0; `key` in the tile, the same in all lanes. P is
  // taken as the fragments that the matrix product uses: the accumulators' registers are free by then.
  template <class MmaType, int kMTiles, int kSteps, int kOutTiles>
  static FKL_DEVICE void add(float (&acc_o)[kMTiles][kOutTiles][4],
                             const typename MmaType::FragmentA (&probs)[kMTiles][kSteps], int key, const Element* value,
                             int num_columns, int lane) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float p = 0.0f;
#pragma unroll
        for (int k_step = 0; k_step < kSteps; ++k_step) {
          // Read first, selected then: a read under the condition becomes an indexed one, from local memory.
          const float x = MmaType::element_of_accumulators(probs[m][k_step], half, key % MmaType::kK);
          p = key / MmaType::kK == k_step ? x : p;
        }
        // From the lane of the quad that has this column.
        p = __shfl_sync(0xffffffffu, p, (lane & ~3) | key % 8 / 2);
        if (p == 0.0f) continue;
        const int num_lane_columns = hidden(num_columns) - accumulator_column(lane, 0);
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * tile + i < num_lane_columns)
              acc_o[m][tile][2 * half + i] =
                  fmaf(p, to_float(value[8 * tile + accumulator_column(lane, i)]), acc_o[m][tile][2 * half + i]);
          }
        }
      }
    }
  }

 private:
  static FKL_DEVICE uint32_t address(uint32_t tile, int row, int chunk) {
    return tile + static_cast<uint32_t>(Tile::chunk_offset(row, chunk));
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_POISONED_VALUES_CUH_
