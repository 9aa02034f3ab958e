// What the generated score and mask functors are made of, and the functors of calls that have none.
//
// One function per operation of a program where C++ has no operator with the same meaning
// (docs/internals.md, section 2): integer arithmetic wraps, max and min propagate NaN, conversions
// saturate. Everything is exact or within a few units in the last place: these functions are what
// the pure-JAX definition is compared with.
#ifndef FKL_DEVICE_ATTENTION_MODS_CUH_
#define FKL_DEVICE_ATTENTION_MODS_CUH_

#include "attention/outer.cuh"
#include "attention/params.cuh"

namespace fkl {

// ---- captured arrays

// Element types without a C++ type of their own, by their bits.
struct CaptureBf16 {
  unsigned short bits;
};
struct CaptureF16 {
  unsigned short bits;
};

FKL_DEVICE float read_element(const float* p) { return __ldg(p); }
FKL_DEVICE float read_element(const double* p) { return static_cast<float>(__ldg(p)); }
FKL_DEVICE float read_element(const CaptureBf16* p) {
  return __int_as_float(static_cast<int>(static_cast<unsigned>(__ldg(&p->bits)) << 16));
}
FKL_DEVICE float read_element(const CaptureF16* p) {
  // Shifted to float's place the exponent is 112 too small; the product repairs that, subnormals
  // included.
  const unsigned bits = __ldg(&p->bits), magnitude = bits & 0x7fffu;
  const float scale_2_112 = __int_as_float(0x77800000);
  const bool is_special = magnitude >= 0x7c00u;
  const float value = is_special ? __int_as_float(static_cast<int>(0x7f800000u | (magnitude << 13)))
                                 : __int_as_float(static_cast<int>(magnitude << 13)) * scale_2_112;
  return bits & 0x8000u ? -value : value;
}
FKL_DEVICE int read_element(const int* p) { return __ldg(p); }
FKL_DEVICE int read_element(const unsigned* p) { return static_cast<int>(__ldg(p)); }
FKL_DEVICE int read_element(const short* p) { return __ldg(p); }
FKL_DEVICE int read_element(const unsigned short* p) { return __ldg(p); }
FKL_DEVICE int read_element(const signed char* p) { return __ldg(p); }
FKL_DEVICE int read_element(const unsigned char* p) { return __ldg(p); }
FKL_DEVICE int read_element(const long long* p) { return static_cast<int>(__ldg(p)); }  // indices wrap to 32 bits
FKL_DEVICE bool read_element(const bool* p) { return __ldg(reinterpret_cast<const unsigned char*>(p)) != 0; }

// An index into an axis is clamped to it, as XLA clamps.
FKL_DEVICE int clamp_index(int index, int size) { return index < 0 ? 0 : index >= size ? size - 1 : index; }

// The sum over lanes that differ in the bits of kLaneMask: 31 the warp, 3 the four lanes that share
// a row of an mma accumulator, 28 the eight that share a column of one.
template <int kLaneMask>
FKL_DEVICE float sum_over_lanes(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    if (kLaneMask & bit) value += __shfl_xor_sync(0xffffffffu, value, bit);
  }
  return value;
}

FKL_DEVICE int mod_lane() { return static_cast<int>(threadIdx.x) & 31; }

// A sum that has not yet been added to the element it is for; starts as {}.
template <class Offset>
struct PendingGrad {
  Offset offset;
  float sum;
};

// The gradients of the captures of a call: pointers at this outer element, null where
// none is asked for.
struct CaptureGrads {
  float* data[kMaxCaptures];

  static FKL_DEVICE CaptureGrads bind(const BackwardParams& params, const OuterIndex& outer) {
    CaptureGrads grads;
#pragma unroll
    for (int k = 0; k < kMaxCaptures; ++k) grads.data[k] = at_outer<float>(params.dcaptures[k], outer);
    return grads;
  }

  // What one lane has for an element: kept until it has something for another one. Of a table of
  // clipped distances, far from the diagonal all scores read the same element; sent one by one,
  // additions to one address wait for each other.
  template <class Offset>
  FKL_DEVICE void add_later(int capture, PendingGrad<Offset>& pending, Offset offset, float value) const {
    if (data[capture] == nullptr || value == 0.0f) return;
    if (offset != pending.offset) replace(capture, pending, offset);
    pending.sum += value;
  }
  // The same for two elements in turn: the keys that a lane owns.
  template <class Offset>
  FKL_DEVICE void add_later(int capture, PendingGrad<Offset> (&pending)[2], Offset offset, float value) const {
    if (data[capture] == nullptr || value == 0.0f) return;
    if (offset != pending[0].offset) {
      const PendingGrad<Offset> other = pending[1];
      pending[1] = pending[0];
      pending[0] = other;
      if (offset != other.offset) replace(capture, pending[0], offset);
    }
    pending[0].sum += value;
  }
  // All lanes of the warp call it together.
  template <class Offset>
  FKL_DEVICE void flush(int capture, const PendingGrad<Offset>& pending) const {
    if (data[capture] == nullptr) return;
    const Offset first = __shfl_sync(0xffffffffu, pending.offset, 0);
    if (__all_sync(0xffffffffu, pending.offset == first)) {
      add_sum<31>(capture, first, pending.sum);
    } else if (pending.sum != 0.0f) {
      atomicAdd(data[capture] + pending.offset, pending.sum);
    }
  }
  template <class Offset>
  FKL_DEVICE void flush(int capture, const PendingGrad<Offset> (&pending)[2]) const {
    flush(capture, pending[0]);
    flush(capture, pending[1]);
  }

  // What the lanes that differ in kLaneMask have for the same element; all lanes of the warp call
  // it together.
  template <int kLaneMask>
  FKL_DEVICE void add_sum(int capture, long long offset, float value) const {
    if (data[capture] == nullptr) return;
    value = sum_over_lanes<kLaneMask>(value);
    if ((mod_lane() & kLaneMask) == 0 && value != 0.0f) atomicAdd(data[capture] + offset, value);
  }

 private:
  template <class Offset>
  FKL_DEVICE void replace(int capture, PendingGrad<Offset>& pending, Offset offset) const {
    if (pending.sum != 0.0f) atomicAdd(data[capture] + pending.offset, pending.sum);
    pending = {offset, 0.0f};
  }
};

// ---- floating point

FKL_DEVICE float fast_exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

FKL_DEVICE float fast_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// Division within one unit in the last place, without the subroutine of the operator: one
// correction of the quotient.
FKL_DEVICE float div_f32(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(b));
  const float q = a * r, corrected = fmaf(fmaf(-q, b, a), r, q);
  return corrected == corrected ? corrected : q;  // infinities and zeros: the remainder is NaN, the quotient is right
#else
  return a / b;
#endif
}

FKL_DEVICE float sqrt_f32(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return sqrtf(x);
#endif
}

FKL_DEVICE bool is_nan(float x) { return x != x; }

FKL_DEVICE float max_f32(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return is_nan(a) || a > b ? a : b;
#endif
}

FKL_DEVICE float min_f32(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return is_nan(a) || a < b ? a : b;
#endif
}

FKL_DEVICE float sign_f32(float x) { return x == 0.0f || is_nan(x) ? x : copysignf(1.0f, x); }

// tanh.approx is wrong from the 11th bit on. Here: 1 - 2 / (exp(2 |x|) + 1), and near 0, where that
// cancels, x times an even polynomial; two units in the last place.
FKL_DEVICE float tanh_f32(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f, kSmall = 0.625f;
  const float ax = fabsf(x), z = x * x;
  const float large = fmaf(-2.0f, fast_reciprocal(fast_exp2(ax * kTwoLog2E) + 1.0f), 1.0f);
  float p = -5.70498872745e-3f;
  p = fmaf(p, z, 2.06390887954e-2f);
  p = fmaf(p, z, -5.37397155531e-2f);
  p = fmaf(p, z, 1.33314422036e-1f);
  p = fmaf(p, z, -3.33332819422e-1f);
  const float small = fmaf(p * z, x, x);
  return ax < kSmall ? small : copysignf(large, x);
}

// ---- runs of keys (docs/cuda.md, section 2)

// What the cheap form of a score program takes for granted. Looked at once per tile; if it does not hold, the tile is
// done again by the program as it is written.
struct RunGuard {
  static constexpr unsigned kTripped = 0x40000000u;  // of a float: its magnitude is not below 2

  unsigned bits = 0;

  FKL_DEVICE void see(float x) { bits |= static_cast<unsigned>(__float_as_int(x)); }
  // An index that is first + delta at the last key must not wrap on the way there.
  FKL_DEVICE void see_run(int first, int delta) {
    const int last = wrapping_add(first, delta);
    bits |= (delta < 0 ? last > first : last < first) ? kTripped : 0u;
  }
  FKL_DEVICE bool is_tripped() const { return (bits & kTripped) != 0; }
};

// The same value, but not before `p` is known; `zero` is 0, which the compiler must not know.
FKL_DEVICE float not_before(float p, unsigned zero, float x) {
  return __int_as_float(__float_as_int(x) | (__float_as_int(p) & static_cast<int>(zero)));
}

// tanh(x / kTanhUnits) / kTanhLead, if |x| < 2: that is, for arguments up to kTanhReach; relative error 5e-7. x times
// an even polynomial whose first coefficient is 1 (a second constant in one instruction would be a move). No
// transcendental instruction: the exponential of the softmax keeps that unit busy.
constexpr float kTanhReach = 0.7f, kTanhUnits = 2.0f / kTanhReach, kTanhLead = 1.0855838e-06f;
FKL_DEVICE float tanh_small(float x) {
  const float z = x * x;
  float p = z + -3.2707678e-05f / kTanhLead;
  p = fmaf(p, z, 6.9754891e-04f / kTanhLead);
  p = fmaf(p, z, -1.4290329e-02f / kTanhLead);
  p = fmaf(p, z, 3.4999990e-01f / kTanhLead);
  return x * p;
}

// x minus the nearest multiple of pi / 2, and which one that is, modulo 4. The library's sine
// inlines a loop over memory for large arguments, once per score; here those take double precision
// (good to 2^50; beyond, 0 stands for what nobody knows).
FKL_DEVICE float reduce_angle(float x, int* quadrant) {
  constexpr float kLargest = 48000.0f;
  if (!(fabsf(x) > kLargest)) {
    const float n = rintf(x * 0.636619772f);
    *quadrant = static_cast<int>(n) & 3;
    // pi / 2 in three parts; each product is exact inside the fma.
    float r = fmaf(n, -1.57079637050628662109375f, x);
    r = fmaf(n, 4.37113900018624283e-8f, r);
    return fmaf(n, 1.71512451e-15f, r);
  }
  const double n = rint(x * 0.63661977236758134308);
  *quadrant = static_cast<int>(static_cast<long long>(n)) & 3;
  const float r =
      static_cast<float>(fma(n, -6.123233995736766036e-17, fma(n, -1.5707963267948965580, static_cast<double>(x))));
  return fabsf(r) <= 1.0f ? r : x - x;
}

// On [-pi / 4, pi / 4].
FKL_DEVICE float sin_reduced(float r) {
  const float z = r * r;
  return fmaf(r * z, fmaf(z, fmaf(z, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f), r);
}
FKL_DEVICE float cos_reduced(float r) {
  const float z = r * r;
  const float p = fmaf(z, fmaf(z, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f);
  return fmaf(z * z, p, fmaf(-0.5f, z, 1.0f));
}

FKL_DEVICE float sin_f32(float x) {
  int quadrant;
  const float r = reduce_angle(x, &quadrant);
  const float y = quadrant & 1 ? cos_reduced(r) : sin_reduced(r);
  return quadrant & 2 ? -y : y;
}
FKL_DEVICE float cos_f32(float x) {
  int quadrant;
  const float r = reduce_angle(x, &quadrant);
  const float y = quadrant & 1 ? sin_reduced(r) : cos_reduced(r);
  return quadrant == 1 || quadrant == 2 ? -y : y;
}
FKL_DEVICE float tan_f32(float x) {
  int quadrant;
  const float r = reduce_angle(x, &quadrant);
  const float s = sin_reduced(r), c = cos_reduced(r);
  return quadrant & 1 ? -div_f32(c, s) : div_f32(s, c);
}

FKL_DEVICE float round_bf16(float x) {
  const unsigned bits = static_cast<unsigned>(__float_as_int(x));
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return is_nan(x) ? x : __int_as_float(static_cast<int>(rounded));  // the carry could turn a NaN into a number
}

FKL_DEVICE float round_f16(float x) {
  constexpr float kMinNormal = 6.103515625e-5f, kOverflow = 65520.0f;
  const float ax = fabsf(x);
  const unsigned bits = static_cast<unsigned>(__float_as_int(ax));
  const float normal = __int_as_float(static_cast<int>((bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u));
  const float subnormal = (ax + 0.5f) - 0.5f;  // to a multiple of 2^-24
  float y = ax < kMinNormal ? subnormal : normal;
  y = ax >= kOverflow ? __int_as_float(0x7f800000) : y;
  return is_nan(x) ? x : copysignf(y, x);
}

FKL_DEVICE bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

FKL_DEVICE int f32_to_i32(float x) { return __float2int_rz(x); }  // saturates, NaN gives 0

// ---- integers

FKL_DEVICE int add_i32(int a, int b) { return wrapping_add(a, b); }
FKL_DEVICE int sub_i32(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) - static_cast<unsigned>(b)); }
FKL_DEVICE int mul_i32(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b)); }
FKL_DEVICE int neg_i32(int a) { return sub_i32(0, a); }
FKL_DEVICE int abs_i32(int a) { return a < 0 ? neg_i32(a) : a; }
FKL_DEVICE int sign_i32(int a) { return (a > 0) - (a < 0); }
FKL_DEVICE int div_i32(int a, int b) { return b == 0 ? -1 : b == -1 ? neg_i32(a) : a / b; }
FKL_DEVICE int rem_i32(int a, int b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
FKL_DEVICE int max_i32(int a, int b) { return a > b ? a : b; }
FKL_DEVICE int min_i32(int a, int b) { return a < b ? a : b; }
// A shift of 32 or more leaves nothing, or the sign.
FKL_DEVICE int shl_i32(int a, int b) {
  return static_cast<unsigned>(b) < 32u ? static_cast<int>(static_cast<unsigned>(a) << b) : 0;
}
FKL_DEVICE int shra_i32(int a, int b) { return a >> (static_cast<unsigned>(b) < 32u ? b : 31); }
FKL_DEVICE int shrl_i32(int a, int b) {
  return static_cast<unsigned>(b) < 32u ? static_cast<int>(static_cast<unsigned>(a) >> b) : 0;
}

// ---- calls without mods

enum TileState : int { kTileDead = 0, kTileMixed = 1, kTileLive = 2 };

// What every score functor is. `score` is the score before the program. In the backward a program's
// derivative is taken and the gradients of its captures are summed: for elements that depend on the
// head only in HeadGrads, on the row only in RowGrads, else they are added at once. `ct` is the
// gradient of the program's result; where it is exactly 0 (the kernel selects that for dead scores)
// the derivative is 0 and nothing is added, whatever the score is, NaN included. flush_row adds
// what the lanes of kLaneMask (above) have for a row and zeroes it, flush_head what the warp has;
// all lanes of a warp flush together. HeadGrads and RowGrads start as {}.
struct NoScoreMod {
  static constexpr bool kIsIdentity = true, kReadsRow = false, kHasQueryRun = false, kHasConstantSlope = true;
  struct Head {};
  struct Row {};
  struct HeadGrads {};
  struct RowGrads {};
  static FKL_DEVICE NoScoreMod bind(const CommonParams&, const OuterIndex&) { return {}; }
  FKL_DEVICE Head bind_head(int, int) const { return {}; }
  FKL_DEVICE Row bind_row(const Head&, int) const { return {}; }
  FKL_DEVICE float score(const Head&, const Row&, float score, int) const { return score; }
  FKL_DEVICE float derivative(const Head&, const Row&, float, int, float ct, const CaptureGrads&, HeadGrads&,
                              RowGrads&) const {
    return ct;
  }
  template <int kLaneMask>
  FKL_DEVICE void flush_row(const Head&, const Row&, const CaptureGrads&, RowGrads&) const {}
  FKL_DEVICE void flush_head(const Head&, const CaptureGrads&, HeadGrads&) const {}
};

struct NoMaskMod {
  static constexpr bool kIsIdentity = true, kReadsRow = false;
  struct Head {};
  struct Row {};
  static FKL_DEVICE NoMaskMod bind(const CommonParams&, const OuterIndex&) { return {}; }
  FKL_DEVICE Head bind_head(int, int) const { return {}; }
  FKL_DEVICE Row bind_row(const Head&, int) const { return {}; }
  FKL_DEVICE bool live(const Head&, const Row&, int) const { return true; }
  FKL_DEVICE int classify(const Head&, int, int, int, int) const { return kTileLive; }
};

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_MODS_CUH_
