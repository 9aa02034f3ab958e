// Integer names, element types and function markers. The only header that knows which compiler reads it:
// NVRTC (no headers at all), nvcc (both passes), or a host C++ compiler (address maps in the CPU tests).
#ifndef FKL_DEVICE_CORE_TYPES_CUH_
#define FKL_DEVICE_CORE_TYPES_CUH_

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define FKL_DEVICE __device__ __forceinline__
#define FKL_HOST_DEVICE __host__ __device__ __forceinline__
#define FKL_CONSTEXPR __host__ __device__ constexpr
#else
#define FKL_HOST_DEVICE inline
#define FKL_CONSTEXPR constexpr
#endif

namespace fkl {

// 16-bit elements are raw bits: the conversions live in core/math.cuh, so no CUDA header is needed.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// 16 bytes, the unit of copies between global and shared memory.
struct alignas(16) Chunk16 {
  uint32_t word[4];
};
struct alignas(8) Chunk8 {
  uint32_t word[2];
};

constexpr int kWarpSize = 32;

template <class A, class B>
struct IsSame {
  static constexpr bool kValue = false;
};
template <class A>
struct IsSame<A, A> {
  static constexpr bool kValue = true;
};

FKL_CONSTEXPR int ceil_div(int a, int b) { return (a + b - 1) / b; }
FKL_CONSTEXPR int round_up(int a, int multiple) { return ceil_div(a, multiple) * multiple; }
FKL_CONSTEXPR int min_int(int a, int b) { return a < b ? a : b; }
FKL_CONSTEXPR int max_int(int a, int b) { return a > b ? a : b; }
FKL_CONSTEXPR int floor_power_of_two(int x) { return x < 2 ? x : 2 * floor_power_of_two(x / 2); }

}  // namespace fkl

#endif  // FKL_DEVICE_CORE_TYPES_CUH_
