// Copies of whole tiles from global to shared memory, rows and columns beyond the matrix become zero.
//
// Legality class of an operand, a compile-time switch:
//   kAligned   pointer, every stride and the row's real length are multiples of 16 bytes: one cp.async per chunk
//   otherwise  the widest of 8 and 4 bytes that divides them (found once per tile copy object), or single elements
//   through registers
#ifndef FKL_DEVICE_TILE_COPY_CUH_
#define FKL_DEVICE_TILE_COPY_CUH_

#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/layout.cuh"

namespace fkl {

// One matrix in global memory, read tile by tile by `kThreads` threads. Asynchronous: commit and wait are the caller's,
// a barrier is needed before other threads read, whatever the class.
//
// Each thread has one chunk of every kRowStep-th row (some threads have none if the chunks do not divide them). The
// step is a power of two, so that the swizzle of all its places differs by constants: a copy costs an addition of the
// source, a comparison and the instruction itself, and no registers between tiles but the two starts.
template <class Tile, bool kAligned, int kThreads>
class TileCopy {
 public:
  using Element = typename Tile::Element;

  FKL_DEVICE TileCopy() {}
  // `data` is the first row; `row_stride` and `num_columns` (the real ones) in elements.
  FKL_DEVICE TileCopy(const Element* data, long long row_stride, int num_columns, int thread)
      : row_stride_bytes_(row_stride * kElementBytes) {
    const int chunk = thread % kRowThreads;
    row_ = thread / kRowThreads;
    valid_bytes_ = num_columns * kElementBytes - chunk * kChunkBytes;
    destination_ = static_cast<uint32_t>(Tile::chunk_offset(row_, chunk));
    data_ = reinterpret_cast<const char*>(data) + row_ * row_stride_bytes_ + chunk * kChunkBytes;
    if constexpr (!kAligned) {
      const unsigned low_bits = static_cast<unsigned>(reinterpret_cast<unsigned long long>(data)) |
                                static_cast<unsigned>(row_stride_bytes_) |
                                static_cast<unsigned>(num_columns * kElementBytes);
      width_ = low_bits % 8 == 0 ? 8 : low_bits % 4 == 0 ? 4 : kElementBytes;
    }
    if (kRowStep * kRowThreads < kThreads && row_ >= kRowStep) row_ = Tile::kRows;  // none
    // A chunk beyond the columns is one of a row beyond the end.
    if (kParts == 1) first_valid_row_ = valid_bytes_ > 0 ? row_ : kNoRow;
  }

  // Rows first_row .. first_row + Tile::kRows - 1 to the tile at `tile`; rows from `end_row` on become zero.
  FKL_DEVICE void copy(uint32_t tile, int first_row, int end_row) const {
    const char* source = data_ + first_row * row_stride_bytes_;
    const uint32_t destination = tile + destination_;
    // From this thread's first one on.
    const int num_rows = end_row - first_row - (kParts == 1 ? first_valid_row_ : row_);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * kRowStep;
      if ((kRowStep * kRowThreads < kThreads || row + kRowStep > Tile::kRows) && row_ + row >= Tile::kRows) break;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column_bytes = part * kRowThreads * kChunkBytes;
        copy_chunk((destination ^ static_cast<uint32_t>(Tile::phase(row) * kChunkBytes)) +
                       static_cast<uint32_t>(row * Tile::kRowBytes + column_bytes),
                   source + column_bytes, row < num_rows, valid_bytes_ - column_bytes);
      }
      source += kRowStep * row_stride_bytes_;
    }
  }

 private:
  static constexpr int kNoRow = 1 << 30;
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  // Threads that share a row. If it has more chunks than there are threads, a thread has several, a power of two apart.
  static constexpr int kRowThreads =
      Tile::kChunks <= kThreads ? Tile::kChunks : min_int(Tile::kChunks & -Tile::kChunks, floor_power_of_two(kThreads));
  static constexpr int kParts = Tile::kChunks / kRowThreads;
  static constexpr int kRowStep = floor_power_of_two(min_int(kThreads / kRowThreads, Tile::kRows));
  static constexpr int kSteps = ceil_div(Tile::kRows, kRowStep);

  // `valid_bytes` of the chunk lie inside the row (zero, negative or more than a chunk: clipped).
  FKL_DEVICE void copy_chunk(uint32_t destination, const char* source, bool is_valid_row, int valid_bytes) const {
    if constexpr (kAligned) {
      cp_async_16(destination, source, is_valid_row && (kParts == 1 || valid_bytes > 0));
    } else {
      if (!is_valid_row) valid_bytes = 0;
      if (width_ == 8) {
#pragma unroll
        for (int j = 0; j < kChunkBytes; j += 8)
          cp_async_8(destination + static_cast<uint32_t>(j), source + j, j < valid_bytes);
      } else if (width_ == 4) {
#pragma unroll
        for (int j = 0; j < kChunkBytes; j += 4)
          cp_async_4(destination + static_cast<uint32_t>(j), source + j, j < valid_bytes);
      } else if constexpr (kElementBytes == 2) {
        Chunk16 value;
#pragma unroll
        for (int j = 0; j < kChunkBytes; j += 4) {
          const uint32_t low = j < valid_bytes ? load_global_u16(source + j) : 0;
          const uint32_t high = j + 2 < valid_bytes ? load_global_u16(source + j + 2) : 0;
          value.word[j / 4] = low | high << 16;
        }
        store_shared_16(destination, value);
      }
    }
  }

  const char* data_;
  long long row_stride_bytes_;
  uint32_t destination_;  // of the thread's first chunk in a tile
  int row_;               // its row
  int first_valid_row_;   // the same, or kNoRow
  int valid_bytes_;       // of the row, from its chunk on
  int width_;             // of the unaligned class: bytes per copy
};

// One row's neighbouring columns `column`, `column + 1` to global memory, as far as they exist.
template <bool kAligned, class Element>
FKL_DEVICE void store_pair(Element* row, int column, int num_columns, float x, float y) {
  if constexpr (sizeof(Element) == 4) {
    if (column < num_columns) row[column] = x;
    if (column + 1 < num_columns) row[column + 1] = y;
  } else {
    const uint32_t packed = Conversion<Element>::pack(x, y);
    if constexpr (kAligned) {
      if (column < num_columns) store_global_u32(row + column, packed);
    } else {
      if (column < num_columns) store_global_u16(row + column, static_cast<uint16_t>(packed));
      if (column + 1 < num_columns) store_global_u16(row + column + 1, static_cast<uint16_t>(packed >> 16));
    }
  }
}

}  // namespace fkl

#endif  // FKL_DEVICE_TILE_COPY_CUH_
