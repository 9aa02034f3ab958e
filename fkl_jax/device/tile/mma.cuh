// Fragments and matrix products on shared tiles, one interface for bf16, fp16, tf32 and full-accuracy float32.
//
//   Mma<Element, kFullPrecision>::FragmentA / FragmentB    operands of one k step of kK
//   load_a        A[m][k] from a tile stored [m][k]        load_b_pair        two n tiles of B from a tile stored
//   [n][k] load_a_trans  A[m][k] from a tile stored [k][m]        load_b_pair_trans  two n tiles of B from a tile
//   stored [k][n] load_a_paired A[m][k] from [m][k] for use with a trans B (the same as load_a but for float,
//   tile/layout.cuh) a_from_accumulators                                    P or dS as A, for use with a trans B
// The paired k order belongs to both operands: {load_a, load_b_pair} or {load_a_paired, load_a_trans,
// a_from_accumulators} x {load_b_pair_trans}.
//
// The loads take a lane's base (`a_base`, `b_base`, ... : once per tile and lane) and a position in compile-time
// multiples, so that an address costs one XOR.
//
// Full accuracy: x = big + small, both TF32; a b ~ big big + big small + small big. What is dropped is below 2^-22 of
// |a b| (small small, and the rounding of small); sums are float32. Non-finite operands: small is 0, so inf and NaN
// stay non-finite, but inf times a finite number can become NaN.
#ifndef FKL_DEVICE_TILE_MMA_CUH_
#define FKL_DEVICE_TILE_MMA_CUH_

#include "core/math.cuh"
#include "core/ptx.cuh"
#include "tile/layout.cuh"

namespace fkl {

template <class Element, bool kFullPrecision = false>
struct Mma;

// ---- 16-bit --------------------------------------------------------------------------------------------------------

template <class Element>
struct Mma16 {
  static constexpr int kK = 16;
  static constexpr bool kLimitsLoads = false;
  static constexpr int kChunksPerStep = 2;  // of k, in a tile whose rows run along k
  struct FragmentA {
    uint32_t reg[4];
  };
  struct FragmentB {
    uint32_t reg[2];
  };

  static FKL_DEVICE void multiply(float (&acc)[4], const FragmentA& a, const FragmentB& b) {
    if constexpr (IsSame<Element, BFloat16>::kValue) {
      mma_m16n8k16_bf16(acc, a.reg, b.reg[0], b.reg[1]);
    } else {
      mma_m16n8k16_fp16(acc, a.reg, b.reg[0], b.reg[1]);
    }
  }

  // A lane's address in a tile at `tile`; the same for every fragment of the tile.
  struct Base {
    uint32_t address;
  };
  static FKL_DEVICE Base moved(Base base, uint32_t bytes) { return Base{base.address + bytes}; }
  template <class Tile>
  static FKL_DEVICE Base a_base(uint32_t tile, int lane) {
    return Base{tile + static_cast<uint32_t>(Tile::chunk_offset(rows_first_place(lane)))};
  }
  template <class Tile>
  static FKL_DEVICE Base b_base(uint32_t tile, int lane) {
    return Base{tile + static_cast<uint32_t>(Tile::chunk_offset(chunks_first_place(lane)))};
  }
  template <class Tile>
  static FKL_DEVICE Base a_trans_base(uint32_t tile, int lane) {
    return b_base<Tile>(tile, lane);
  }
  template <class Tile>
  static FKL_DEVICE Base b_trans_base(uint32_t tile, int lane) {
    return a_base<Tile>(tile, lane);
  }
  template <class Tile>
  static FKL_DEVICE Base a_paired_base(uint32_t tile, int lane) {
    return a_base<Tile>(tile, lane);
  }

  // `m_row`, `k_step`: first row of the fragment, number of the k step.
  template <class Tile>
  static FKL_DEVICE void load_a(FragmentA& a, Base base, int m_row, int k_step) {
    ldmatrix_x4(a.reg, Tile::advance(base.address, m_row, k_step * kChunksPerStep));
  }
  template <class Tile>
  static FKL_DEVICE void load_a_paired(FragmentA& a, Base base, int m_row, int k_step) {
    load_a<Tile>(a, base, m_row, k_step);
  }
  // Rows n_row .. n_row + 15 of the tile: n tiles 0 and 1.
  template <class Tile>
  static FKL_DEVICE void load_b_pair(FragmentB (&b)[2], Base base, int n_row, int k_step) {
    uint32_t r[4];
    ldmatrix_x4(r, Tile::advance(base.address, n_row, k_step * kChunksPerStep));
    split(b, r);
  }
  // Columns n_column .. n_column + 15 of the tile.
  template <class Tile>
  static FKL_DEVICE void load_b_pair_trans(FragmentB (&b)[2], Base base, int n_column, int k_step) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, Tile::advance(base.address, k_step * kK, n_column / 8));
    split(b, r);
  }
  template <class Tile>
  static FKL_DEVICE void load_a_trans(FragmentA& a, Base base, int m_column, int k_step) {
    ldmatrix_x4_trans(a.reg, Tile::advance(base.address, k_step * kK, m_column / 8));
  }
  // k step `k_step` of the accumulators of one m tile: n tiles 2 k_step and 2 k_step + 1.
  template <int kTilesN>
  static FKL_DEVICE void a_from_accumulators(FragmentA& a, const float (&acc)[kTilesN][4], int k_step) {
    static_assert(kTilesN % 2 == 0, "a k step of 16 is two accumulator tiles");
    const float (&low)[4] = acc[2 * k_step];
    const float (&high)[4] = acc[2 * k_step + 1];
    a.reg[0] = Conversion<Element>::pack(low[0], low[1]);
    a.reg[1] = Conversion<Element>::pack(low[2], low[3]);
    a.reg[2] = Conversion<Element>::pack(high[0], high[1]);
    a.reg[3] = Conversion<Element>::pack(high[2], high[3]);
  }
  // Of such a fragment: row g + 8 * half, column `k` (0 .. kK - 1), if it is this lane's (k % 8 / 2 == t).
  static FKL_DEVICE float element_of_accumulators(const FragmentA& a, int half, int k) {
    const uint32_t low = half == 0 ? a.reg[0] : a.reg[1];
    const uint32_t high = half == 0 ? a.reg[2] : a.reg[3];
    const uint32_t pair = k < 8 ? low : high;
    return to_float(Element{static_cast<uint16_t>(k % 2 == 0 ? pair : pair >> 16)});
  }

 private:
  static FKL_DEVICE void split(FragmentB (&b)[2], const uint32_t (&r)[4]) {
    b[0].reg[0] = r[0];
    b[0].reg[1] = r[1];
    b[1].reg[0] = r[2];
    b[1].reg[1] = r[3];
  }
};

template <bool kFullPrecision>
struct Mma<BFloat16, kFullPrecision> : Mma16<BFloat16> {};
template <bool kFullPrecision>
struct Mma<Float16, kFullPrecision> : Mma16<Float16> {};

// ---- float32 -------------------------------------------------------------------------------------------------------

// One register of an operand: its TF32 value and, at full accuracy, the TF32 value of the rest.
template <bool kFullPrecision>
struct Tf32Operand;
template <>
struct Tf32Operand<false> {
  template <int kCount>
  struct Registers {
    uint32_t big[kCount];
    FKL_DEVICE void set(int i, float x) { big[i] = convert_tf32(x); }
    FKL_DEVICE float get(int i) const { return __uint_as_float(big[i]); }
  };
};
template <>
struct Tf32Operand<true> {
  template <int kCount>
  struct Registers {
    uint32_t big[kCount];
    uint32_t small[kCount];
    FKL_DEVICE void set(int i, float x) {
      big[i] = convert_tf32(x);
      const float rounded = __uint_as_float(big[i]);
      // Equality also catches inf, where the difference would be NaN.
      small[i] = rounded == x ? 0u : convert_tf32(x - rounded);
    }
    FKL_DEVICE float get(int i) const { return __uint_as_float(big[i]) + __uint_as_float(small[i]); }
  };
};

template <bool kFullPrecision>
struct Mma<float, kFullPrecision> {
  static constexpr int kK = 8;
  // Fragments in two parts take twice the registers: they should not be loaded far ahead.
  static constexpr bool kLimitsLoads = kFullPrecision;
  static constexpr int kChunksPerStep = 2;
  using FragmentA = typename Tf32Operand<kFullPrecision>::template Registers<4>;
  using FragmentB = typename Tf32Operand<kFullPrecision>::template Registers<2>;

  static FKL_DEVICE void multiply(float (&acc)[4], const FragmentA& a, const FragmentB& b) {
    if constexpr (kFullPrecision) {  // small terms first
      mma_m16n8k8_tf32(acc, a.small, b.big[0], b.big[1]);
      mma_m16n8k8_tf32(acc, a.big, b.small[0], b.small[1]);
    }
    mma_m16n8k8_tf32(acc, a.big, b.big[0], b.big[1]);
  }

  struct Base {
    uint32_t address;
  };
  // Rows 2t and 2t + 1 are in different phases: two addresses.
  struct TransBase {
    uint32_t even, odd;
  };
  // The same place in a tile `bytes` further (a multiple of kSharedAlignment).
  static FKL_DEVICE Base moved(Base base, uint32_t bytes) { return Base{base.address + bytes}; }
  static FKL_DEVICE TransBase moved(TransBase base, uint32_t bytes) {
    return TransBase{base.even + bytes, base.odd + bytes};
  }
  template <class Tile>
  static FKL_DEVICE Base a_base(uint32_t tile, int lane) {
    return Base{tile + static_cast<uint32_t>(Tile::chunk_offset(rows_first_place(lane)))};
  }
  template <class Tile>
  static FKL_DEVICE Base b_base(uint32_t tile, int lane) {
    return Base{tile + static_cast<uint32_t>(Tile::chunk_offset(chunks_first_place(lane)))};
  }
  template <class Tile>
  static FKL_DEVICE Base a_paired_base(uint32_t tile, int lane) {
    return Base{tile + static_cast<uint32_t>(Tile::element_offset(lane / 4, 2 * (lane % 4)))};
  }
  template <class Tile>
  static FKL_DEVICE TransBase b_trans_base(uint32_t tile, int lane) {
    const int row = 2 * (lane % 4);
    return TransBase{tile + static_cast<uint32_t>(Tile::element_offset(row, lane / 4)),
                     tile + static_cast<uint32_t>(Tile::element_offset(row + 1, lane / 4))};
  }
  template <class Tile>
  static FKL_DEVICE TransBase a_trans_base(uint32_t tile, int lane) {
    return b_trans_base<Tile>(tile, lane);
  }

  // A row of four floats is a row of an ldmatrix matrix: lane (g, t) receives float t of row g.
  template <class Tile>
  static FKL_DEVICE void load_a(FragmentA& a, Base base, int m_row, int k_step) {
    uint32_t r[4];
    ldmatrix_x4(r, Tile::advance(base.address, m_row, k_step * kChunksPerStep));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, __uint_as_float(r[i]));
  }
  template <class Tile>
  static FKL_DEVICE void load_b_pair(FragmentB (&b)[2], Base base, int n_row, int k_step) {
    uint32_t r[4];
    ldmatrix_x4(r, Tile::advance(base.address, n_row, k_step * kChunksPerStep));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, __uint_as_float(r[i]));
  }
  template <class Tile>
  static FKL_DEVICE void load_a_paired(FragmentA& a, Base base, int m_row, int k_step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Chunk8 pair = load_shared_8(Tile::advance(base.address, m_row + 8 * half, k_step * kChunksPerStep));
      a.set(half, __uint_as_float(pair.word[0]));
      a.set(2 + half, __uint_as_float(pair.word[1]));
    }
  }
  template <class Tile>
  static FKL_DEVICE void load_b_pair_trans(FragmentB (&b)[2], TransBase base, int n_column, int k_step) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int chunk = n_column / 4 + 2 * n;
      b[n].set(0, load_shared_f32(Tile::advance(base.even, k_step * kK, chunk)));
      b[n].set(1, load_shared_f32(Tile::advance(base.odd, k_step * kK, chunk)));
    }
  }
  template <class Tile>
  static FKL_DEVICE void load_a_trans(FragmentA& a, TransBase base, int m_column, int k_step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = m_column / 4 + 2 * half;
      a.set(half, load_shared_f32(Tile::advance(base.even, k_step * kK, chunk)));
      a.set(2 + half, load_shared_f32(Tile::advance(base.odd, k_step * kK, chunk)));
    }
  }
  template <int kTilesN>
  static FKL_DEVICE void a_from_accumulators(FragmentA& a, const float (&acc)[kTilesN][4], int k_step) {
    a.set(0, acc[k_step][0]);
    a.set(1, acc[k_step][2]);
    a.set(2, acc[k_step][1]);
    a.set(3, acc[k_step][3]);
  }
  static FKL_DEVICE float element_of_accumulators(const FragmentA& a, int half, int k) {
    return k % 2 == 0 ? a.get(half) : a.get(2 + half);
  }
};

}  // namespace fkl

#endif  // FKL_DEVICE_TILE_MMA_CUH_
