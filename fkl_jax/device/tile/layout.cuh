// Where things are: swizzled shared tiles and the fragments of mma.sync, as pure integer functions (also compiled and
// tested by a host compiler, tests/device/layout_test.cc).
//
// Shared tiles are row-major, rows of 16-byte chunks. Chunk c of row r is stored at place c ^ phase(r), so that the
// eight rows that one ldmatrix phase reads fall into different bank groups: with n chunks per row, rows repeat their
// bank groups modulo 8 / L, L the largest power of two (at most 8) that divides n, and the phase covers the rest.
//
// Fragments of mma.sync m16n8k16 (16-bit) and m16n8k8 (tf32), g = lane / 4, t = lane % 4:
//   accumulator [0], [1]: row g, columns 2t, 2t+1;  [2], [3]: row g + 8, the same columns
//   16-bit A: {(g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..)}, B: {(k 2t.., n g), (k 2t+8.., n g)}
//   tf32 A: {(g, t), (g+8, t), (g, t+4), (g+8, t+4)},               B: {(k t, n g), (k t+4, n g)}
// Neighbouring accumulators are a 16-bit A fragment as they stand. For tf32 they are one if k is numbered in another
// order, k slot t = column 2t and slot t + 4 = column 2t + 1 ("paired order"); every "trans" fragment uses it.
#ifndef FKL_DEVICE_TILE_LAYOUT_CUH_
#define FKL_DEVICE_TILE_LAYOUT_CUH_

#include "core/types.cuh"

namespace fkl {

constexpr int kChunkBytes = 16;
constexpr int kBankGroups = 8;        // 128 bytes of banks in chunks
constexpr int kSharedAlignment = 128;  // of every tile: XOR of address bits 4..6 stays inside a tile

constexpr int kMmaM = 16;
constexpr int kMmaN = 8;

// Row and column of accumulator value `i` (0..3) in its 16 x 8 tile.
FKL_CONSTEXPR int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
FKL_CONSTEXPR int accumulator_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// A place in a tile: row, chunk.
struct TilePlace {
  int row;
  int chunk;
};

// Lane addresses of one ldmatrix.x4; relative to the fragment's first row and chunk.
//   kRowsFirst: matrices 0, 1 are rows 0-7, 8-15 of chunk 0; 2, 3 of chunk 1.    A from [m][k]; B pair from [k][n], trans
//   kChunksFirst: matrices 0, 1 are chunks 0, 1 of rows 0-7; 2, 3 of rows 8-15.  B pair from [n][k]; A from [k][m], trans
FKL_CONSTEXPR TilePlace rows_first_place(int lane) { return TilePlace{lane % 16, lane / 16}; }
FKL_CONSTEXPR TilePlace chunks_first_place(int lane) {
  return TilePlace{lane % 8 + 8 * (lane / 16), (lane / 8) % 2};
}

template <class ElementType, int kRowCount, int kColumnCount>
struct TileLayout {
  using Element = ElementType;
  static constexpr int kRows = kRowCount;
  static constexpr int kColumns = kColumnCount;
  static constexpr int kChunkElements = kChunkBytes / static_cast<int>(sizeof(Element));
  static constexpr int kChunks = kColumns / kChunkElements;  // per row
  static constexpr int kRowBytes = kChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kColumns % 16 == 0, "columns are padded to a multiple of 16");
  static_assert(kRows % 8 == 0, "fragments have eight rows");

  // Largest power of two that divides the number of chunks, at most all bank groups.
  static constexpr int kSpan = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowsPerPhase = kBankGroups / kSpan;

  static FKL_CONSTEXPR int phase(int row) { return (row / kRowsPerPhase) % kSpan; }
  // Byte offset of a chunk, of an element.
  static FKL_CONSTEXPR int chunk_offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ phase(row)) * kChunkBytes;
  }
  static FKL_CONSTEXPR int chunk_offset(TilePlace place) {
    return chunk_offset(place.row, place.chunk);
  }
  static FKL_CONSTEXPR int element_offset(int row, int column) {
    return chunk_offset(row, column / kChunkElements) +
           column % kChunkElements * static_cast<int>(sizeof(Element));
  }
  // From the address of (row, chunk c), c = 0 or 1, to (row + rows, c + chunks): rows a multiple of 8 (the phase
  // repeats), chunks even (no carry). One XOR and one constant, whatever the lane.
  static FKL_CONSTEXPR uint32_t advance(uint32_t address, int rows, int chunks) {
    return (address ^ static_cast<uint32_t>(chunks % kSpan * kChunkBytes)) +
           static_cast<uint32_t>(chunks / kSpan * kSpan * kChunkBytes + rows * kRowBytes);
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_TILE_LAYOUT_CUH_
