// One wrapper per PTX instruction of compute capability 9.0 (sm_90a): mbarrier, TMA, wgmma, setmaxnreg.
//
// Shared-memory addresses are 32-bit. What the asynchronous proxy (TMA, wgmma) reads after ordinary stores needs
// fence_proxy_async by the writers and then a barrier.
#ifndef FKL_DEVICE_CORE_PTX_SM90_CUH_
#define FKL_DEVICE_CORE_PTX_SM90_CUH_

#include "core/types.cuh"

namespace fkl {

// ---- mbarrier ------------------------------------------------------------------------------------------------------
// A phase ends when all arrivals came and all announced bytes landed. A wait names the parity of the phase it waits
// for; right after `init` a wait for parity 1 passes.

FKL_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes them known to the asynchronous proxy; a barrier of the block follows.
FKL_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
FKL_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
FKL_DEVICE void mbarrier_arrive_expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FKL_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nTRY:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra END;\nbra TRY;\nEND:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Never blocks.
FKL_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- TMA -----------------------------------------------------------------------------------------------------------
// One thread's work. `map` points into the kernel's parameters.

FKL_DEVICE void tma_prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
FKL_DEVICE void tma_load_4d(uint32_t destination, const void* map, uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
FKL_DEVICE void tma_store_4d(const void* map, uint32_t source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// A plain row of bytes, a multiple of 16 at addresses that are multiples of 16.
FKL_DEVICE void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
FKL_DEVICE void bulk_reduce_add(float* destination, uint32_t source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
FKL_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `kPending` of this thread's groups still read shared memory.
template <int kPending>
FKL_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until they are done.
template <int kPending>
FKL_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
FKL_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Warps ---------------------------------------------------------------------------------------------------------

// By whole warpgroups; the block's sum must not exceed what it was launched with.
template <int kRegisters>
FKL_DEVICE void register_count_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FKL_DEVICE void register_count_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// True in one lane of a converged warp, always the same; ptxas keeps what depends on it uniform.
FKL_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
// Synchronises like a named barrier; true in all threads if `value` is in any.
FKL_DEVICE bool named_barrier_or(int barrier, int num_threads, bool value) {
  int result;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbar.red.or.pred q, %1, %2, p;\nselp.s32 %0, 1, 0, q;\n}"
               : "=r"(result)
               : "r"(barrier), "r"(num_threads), "r"(static_cast<int>(value))
               : "memory");
  return result != 0;
}
FKL_DEVICE void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
FKL_DEVICE void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma ---------------------------------------------------------------------------------------------------------

FKL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FKL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
FKL_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Accumulators change behind the compiler's back while a wgmma is in flight: after a wait, tell it so.
template <int kTiles>
FKL_DEVICE void wgmma_touch(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[tile][i])::"memory");
  }
}

// The descriptor of an operand in shared memory, 128-byte swizzled: column chunks of 64 elements (128 bytes), each with
// all rows. `rows` of the whole tile; its address is a multiple of 1024. Moved by adding bytes / 16:
//   K-major (the contiguous axis is summed over)   16 elements of k: 32 bytes, in the next chunk: rows * 128 bytes
//   MN-major (it is M or N)                        16 elements of k: 2048 bytes; 64 of M or N: rows * 128 bytes
FKL_DEVICE uint64_t wgmma_descriptor(uint32_t tile, int rows) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | static_cast<uint64_t>(static_cast<uint32_t>(rows * 128) >> 4) << 16 |
         ((tile >> 4) & 0x3fff);
}
FKL_CONSTEXPR int wgmma_k_major_offset(int rows, int k_step) {
  return (k_step / 4 * rows * 128 + k_step % 4 * 32) >> 4;
}
FKL_CONSTEXPR int wgmma_mn_major_offset(int k_step) { return k_step * 2048 >> 4; }

// acc (64 x N, rows as in tile/layout.cuh: 16 per warp) = a * b, plus acc if `accumulate`.
//   ss  both operands in shared memory; kTransA, kTransB: 0 K-major, 1 MN-major
//   rs  `a` in registers, as accumulators of 16 columns pack to
template <class Element, int kN>
struct Wgmma;

#define FKL_WGMMA_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FKL_WGMMA_1 FKL_WGMMA_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FKL_WGMMA_2 FKL_WGMMA_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FKL_WGMMA_3 FKL_WGMMA_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FKL_WGMMA_4 FKL_WGMMA_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FKL_WGMMA_5 FKL_WGMMA_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FKL_WGMMA_6 FKL_WGMMA_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FKL_WGMMA_7 FKL_WGMMA_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FKL_WGMMA_8 FKL_WGMMA_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FKL_WGMMA_9 FKL_WGMMA_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FKL_WGMMA_10 FKL_WGMMA_9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FKL_WGMMA_11 FKL_WGMMA_10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FKL_WGMMA_12 FKL_WGMMA_11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FKL_WGMMA_13 FKL_WGMMA_12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FKL_WGMMA_14 FKL_WGMMA_13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FKL_WGMMA_15 FKL_WGMMA_14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FKL_ACC_TILE(t) "+f"(acc[t][0]), "+f"(acc[t][1]), "+f"(acc[t][2]), "+f"(acc[t][3])
#define FKL_ACC_0 FKL_ACC_TILE(0), FKL_ACC_TILE(1)
#define FKL_ACC_1 FKL_ACC_0, FKL_ACC_TILE(2), FKL_ACC_TILE(3)
#define FKL_ACC_2 FKL_ACC_1, FKL_ACC_TILE(4), FKL_ACC_TILE(5)
#define FKL_ACC_3 FKL_ACC_2, FKL_ACC_TILE(6), FKL_ACC_TILE(7)
#define FKL_ACC_4 FKL_ACC_3, FKL_ACC_TILE(8), FKL_ACC_TILE(9)
#define FKL_ACC_5 FKL_ACC_4, FKL_ACC_TILE(10), FKL_ACC_TILE(11)
#define FKL_ACC_6 FKL_ACC_5, FKL_ACC_TILE(12), FKL_ACC_TILE(13)
#define FKL_ACC_7 FKL_ACC_6, FKL_ACC_TILE(14), FKL_ACC_TILE(15)
#define FKL_ACC_8 FKL_ACC_7, FKL_ACC_TILE(16), FKL_ACC_TILE(17)
#define FKL_ACC_9 FKL_ACC_8, FKL_ACC_TILE(18), FKL_ACC_TILE(19)
#define FKL_ACC_10 FKL_ACC_9, FKL_ACC_TILE(20), FKL_ACC_TILE(21)
#define FKL_ACC_11 FKL_ACC_10, FKL_ACC_TILE(22), FKL_ACC_TILE(23)
#define FKL_ACC_12 FKL_ACC_11, FKL_ACC_TILE(24), FKL_ACC_TILE(25)
#define FKL_ACC_13 FKL_ACC_12, FKL_ACC_TILE(26), FKL_ACC_TILE(27)
#define FKL_ACC_14 FKL_ACC_13, FKL_ACC_TILE(28), FKL_ACC_TILE(29)
#define FKL_ACC_15 FKL_ACC_14, FKL_ACC_TILE(30), FKL_ACC_TILE(31)

// `i0` ...: the numbers of the operands after the N / 2 accumulators.
#define FKL_WGMMA(Element, type, N, last, i0, i1, i2, i3, i4, i5, i6)                                       \
  template <>                                                                                               \
  struct Wgmma<Element, N> {                                                                                \
    template <int kTransA, int kTransB>                                                                     \
    static FKL_DEVICE void ss(float (&acc)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                                 \
                   ", 0;\n"                                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FKL_WGMMA_##last    \
                   "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}"                                 \
                   : FKL_ACC_##last                                                                         \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));                          \
    }                                                                                                       \
    template <int kTransB>                                                                                  \
    static FKL_DEVICE void rs(float (&acc)[N / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                                 \
                   ", 0;\n"                                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FKL_WGMMA_##last    \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"           \
                   : FKL_ACC_##last                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));    \
    }                                                                                                       \
  };
#define FKL_WGMMA_TYPES(N, last, ...)               \
  FKL_WGMMA(BFloat16, "bf16", N, last, __VA_ARGS__) \
  FKL_WGMMA(Float16, "f16", N, last, __VA_ARGS__)

FKL_WGMMA_TYPES(32, 1, 16, 17, 18, 19, 20, 21, 22)
FKL_WGMMA_TYPES(64, 3, 32, 33, 34, 35, 36, 37, 38)
FKL_WGMMA_TYPES(80, 4, 40, 41, 42, 43, 44, 45, 46)
FKL_WGMMA_TYPES(96, 5, 48, 49, 50, 51, 52, 53, 54)
FKL_WGMMA_TYPES(112, 6, 56, 57, 58, 59, 60, 61, 62)
FKL_WGMMA_TYPES(128, 7, 64, 65, 66, 67, 68, 69, 70)
FKL_WGMMA_TYPES(144, 8, 72, 73, 74, 75, 76, 77, 78)
FKL_WGMMA_TYPES(160, 9, 80, 81, 82, 83, 84, 85, 86)
FKL_WGMMA_TYPES(176, 10, 88, 89, 90, 91, 92, 93, 94)
FKL_WGMMA_TYPES(192, 11, 96, 97, 98, 99, 100, 101, 102)
FKL_WGMMA_TYPES(208, 12, 104, 105, 106, 107, 108, 109, 110)
FKL_WGMMA_TYPES(224, 13, 112, 113, 114, 115, 116, 117, 118)
FKL_WGMMA_TYPES(240, 14, 120, 121, 122, 123, 124, 125, 126)
FKL_WGMMA_TYPES(256, 15, 128, 129, 130, 131, 132, 133, 134)

}  // namespace fkl

#endif  // FKL_DEVICE_CORE_PTX_SM90_CUH_
