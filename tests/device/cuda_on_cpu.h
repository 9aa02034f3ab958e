// Device code for a host compiler: the intrinsics that it uses, and a warp whose 32 lanes take
// turns on one thread.
//
// RunWarp(f) calls f once per lane. A collective (a vote, a shuffle) waits until every lane has
// come to it; lanes that never come are a deadlock, reported as one.
#ifndef FKL_TESTS_DEVICE_CUDA_ON_CPU_H_
#define FKL_TESTS_DEVICE_CUDA_ON_CPU_H_

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define FKL_DEVICE inline

namespace on_cpu {

constexpr int kLanes = 32;

struct Warp {
  ucontext_t main, context[kLanes];
  std::vector<char> stack[kLanes];
  bool is_done[kLanes];
  long phase[kLanes];
  uint64_t slot[2][kLanes];
  int lane = 0;
  std::function<void()> body;
};
inline Warp warp;

inline void NextLane() {
  const int from = warp.lane;
  for (int step = 1; step <= kLanes; ++step) {
    const int to = (from + step) % kLanes;
    if (warp.is_done[to]) continue;
    if (to == from) return;
    warp.lane = to;
    swapcontext(&warp.context[from], &warp.context[to]);
    return;
  }
  setcontext(&warp.main);
}

inline void Enter() {
  warp.body();
  warp.is_done[warp.lane] = true;
  NextLane();
}

inline void RunWarp(std::function<void()> body) {
  warp.body = std::move(body);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.stack[lane].resize(1 << 18);
    warp.is_done[lane] = false;
    warp.phase[lane] = 0;
    getcontext(&warp.context[lane]);
    warp.context[lane].uc_stack.ss_sp = warp.stack[lane].data();
    warp.context[lane].uc_stack.ss_size = warp.stack[lane].size();
    warp.context[lane].uc_link = nullptr;
    makecontext(&warp.context[lane], Enter, 0);
  }
  warp.lane = 0;
  swapcontext(&warp.main, &warp.context[0]);
  warp.lane = 0;
}

// Every lane's value.
inline const uint64_t* Gather(uint64_t value) {
  const int lane = warp.lane;
  uint64_t* slot = warp.slot[warp.phase[lane] % 2];
  slot[lane] = value;
  const long phase = ++warp.phase[lane];
  for (;;) {
    bool waits = false;
    for (int other = 0; other < kLanes; ++other) {
      if (warp.phase[other] >= phase) continue;
      if (warp.is_done[other]) {
        fprintf(stderr, "lane %d never comes to the collective of lane %d\n", other, lane);
        abort();
      }
      waits = true;
    }
    if (!waits) return slot;
    NextLane();
  }
}

struct Index {
  int x;
};
inline Index ThreadIndex() { return {warp.lane}; }

template <class To, class From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace on_cpu

#define threadIdx (::on_cpu::ThreadIndex())

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float __int_as_float(int x) { return on_cpu::BitCast<float>(x); }
inline int __float_as_int(float x) { return on_cpu::BitCast<int>(x); }
inline int __float2int_rz(float x) {
  if (x != x) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x < -2147483648.0f ? -2147483647 - 1 : static_cast<int>(x);
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline void atomicAdd(float* p, float x) { *p += x; }

inline unsigned __ballot_sync(unsigned, bool x) {
  const uint64_t* all = on_cpu::Gather(x);
  unsigned bits = 0;
  for (int lane = 0; lane < on_cpu::kLanes; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}
inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
inline float __shfl_xor_sync(unsigned, float x, int bits) {
  const uint64_t* all = on_cpu::Gather(static_cast<uint32_t>(__float_as_int(x)));
  return __int_as_float(static_cast<int>(all[on_cpu::warp.lane ^ bits]));
}
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return static_cast<T>(on_cpu::Gather(static_cast<uint64_t>(x))[lane]);
}
inline int __reduce_min_sync(unsigned, int x) {
  const uint64_t* all = on_cpu::Gather(static_cast<uint32_t>(x));
  int y = x;
  for (int lane = 0; lane < on_cpu::kLanes; ++lane) {
    const int other = static_cast<int>(static_cast<uint32_t>(all[lane]));
    y = other < y ? other : y;
  }
  return y;
}
inline int __reduce_max_sync(unsigned mask, int x) { return ~__reduce_min_sync(mask, ~x); }

#endif  // FKL_TESTS_DEVICE_CUDA_ON_CPU_H_
