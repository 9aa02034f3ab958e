// Numbers and conversions that every kernel uses.
#ifndef FKL_DEVICE_CORE_MATH_CUH_
#define FKL_DEVICE_CORE_MATH_CUH_

#include "core/ptx.cuh"
#include "core/types.cuh"

namespace fkl {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

FKL_DEVICE float infinity() { return __int_as_float(0x7f800000); }

FKL_DEVICE float to_float(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
FKL_DEVICE float to_float(Float16 x) { return convert_from_fp16(x.bits); }
FKL_DEVICE float to_float(float x) { return x; }

template <class Element>
struct Conversion;

template <>
struct Conversion<BFloat16> {
  static FKL_DEVICE uint32_t pack(float low, float high) { return convert_bf16x2(low, high); }
  static FKL_DEVICE BFloat16 from_float(float x) {
    return BFloat16{static_cast<uint16_t>(convert_bf16x2(x, 0.0f))};
  }
};
template <>
struct Conversion<Float16> {
  static FKL_DEVICE uint32_t pack(float low, float high) { return convert_fp16x2(low, high); }
  static FKL_DEVICE Float16 from_float(float x) {
    return Float16{static_cast<uint16_t>(convert_fp16x2(x, 0.0f))};
  }
};
template <>
struct Conversion<float> {
  static FKL_DEVICE float from_float(float x) { return x; }
};

// Sum and maximum over the four lanes that share a row of an accumulator. fmaxf drops NaN, so does this maximum.
FKL_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
FKL_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

}  // namespace fkl

#endif  // FKL_DEVICE_CORE_MATH_CUH_
