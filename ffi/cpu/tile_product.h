// Matrix products of one tile of scores that leave out what is dead.
#ifndef FKL_FFI_CPU_TILE_PRODUCT_H_
#define FKL_FFI_CPU_TILE_PRODUCT_H_

#include <algorithm>
#include <cstdint>

#include "cpu/isa.h"
#include "cpu/mask_plan.h"

namespace fkl {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Lanes are keys (scores, dP): `whole` is the product of the whole tile with its `num_kv` keys, A
// having elements of 4 bytes. In a mixed tile (strips not null) only the panels that are live for a
// strip are computed, the others keep garbage.
inline void KeyLaneProduct(const IsaKernels& isa, void (*gemm)(const GemmArgs&), const GemmArgs& whole,
                           const Strip* strips, int num_kv) {
  GemmArgs g = whole;
  if (strips == nullptr) {
    g.num_vectors = num_kv / isa.vector_width;
    gemm(g);
    return;
  }
  const int strip_rows = isa.strip_rows;
  const int num_strips = static_cast<int>(CeilDiv(whole.num_rows, strip_rows));
  g.num_vectors = isa.panel_width / isa.vector_width;
  for (int column = 0; column < num_kv; column += isa.panel_width) {
    g.b = static_cast<const float*>(whole.b) + column / isa.panel_width * whole.b_panel_stride;
    for (int strip = 0; strip < num_strips; ++strip) {
      if (!AnyBit(strips[strip].bits, column, isa.panel_width)) continue;
      const int begin = strip * strip_rows;
      while (strip + 1 < num_strips && AnyBit(strips[strip + 1].bits, column, isa.panel_width)) ++strip;
      g.a = static_cast<const float*>(whole.a) + begin * whole.a_stride;
      g.c = whole.c + begin * whole.c_stride + column;
      g.num_rows = std::min((strip + 1) * strip_rows, whole.num_rows) - begin;
      gemm(g);
    }
  }
}

// Keys are summed over (P V, dS K): in a mixed tile each strip from its first to its last live key.
// `keys_per_step` is 2 for pairs of bf16.
inline void KeySumProduct(const IsaKernels& isa, void (*gemm)(const GemmArgs&), const GemmArgs& whole,
                          const Strip* strips, int num_kv, int keys_per_step) {
  GemmArgs g = whole;
  if (strips == nullptr) {
    g.depth = num_kv / keys_per_step;
    gemm(g);
    return;
  }
  for (int row = 0; row < whole.num_rows; row += isa.strip_rows) {
    const Strip& strip = strips[row / isa.strip_rows];
    if (strip.begin >= strip.end) continue;
    const int first_step = strip.begin / keys_per_step;
    g.a = static_cast<const float*>(whole.a) + row * whole.a_stride + first_step;
    g.b = static_cast<const float*>(whole.b) + first_step * whole.b_stride;
    g.c = whole.c + row * whole.c_stride;
    g.row_scale = whole.row_scale == nullptr ? nullptr : whole.row_scale + row;
    g.num_rows = std::min(isa.strip_rows, whole.num_rows - row);
    g.depth = (strip.end - strip.begin) / keys_per_step;
    gemm(g);
  }
}

}  // namespace fkl

#endif  // FKL_FFI_CPU_TILE_PRODUCT_H_
