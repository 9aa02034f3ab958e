// One wrapper per PTX instruction, compute capability 8.0 and newer. Nothing here knows about tiles or attention.
//
// Shared-memory addresses are 32-bit (`shared_address`). Memory-touching wrappers are volatile and clobber memory, so
// that the compiler keeps their order around barriers; arithmetic wrappers are free to move.
#ifndef FKL_DEVICE_CORE_PTX_CUH_
#define FKL_DEVICE_CORE_PTX_CUH_

#include "core/types.cuh"

namespace fkl {

FKL_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Masked, so that the compiler sees that they are not negative and divides by shifts.
FKL_DEVICE int lane_index() { return static_cast<int>(threadIdx.x & (kWarpSize - 1u)); }
// The shuffle tells the compiler that the value is the same in the whole warp (uniform registers and branches).
FKL_DEVICE int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / kWarpSize), 0) & 31; }

// Read anew at each call, so that what follows from it is computed anew as well and not kept in registers.
FKL_DEVICE int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The same value, but the compiler does not know: what is made from it is made again every time, not kept in registers.
FKL_DEVICE int hidden(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- Asynchronous copies, global to shared -------------------------------------------------------------------------
// With `is_valid` false the destination becomes zero and the source is not touched. (A size between 0 and the whole is
// possible in PTX, but costs four more instructions per copy.)

FKL_DEVICE void cp_async_16(uint32_t destination, const void* source, bool is_valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(is_valid ? 16 : 0)
               : "memory");
}
FKL_DEVICE void cp_async_8(uint32_t destination, const void* source, bool is_valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(is_valid ? 8 : 0)
               : "memory");
}
FKL_DEVICE void cp_async_4(uint32_t destination, const void* source, bool is_valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(is_valid ? 4 : 0)
               : "memory");
}
FKL_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are unfinished.
template <int kPending>
FKL_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Shared memory -------------------------------------------------------------------------------------------------

FKL_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FKL_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
FKL_DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
FKL_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
FKL_DEVICE uint32_t load_shared_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
FKL_DEVICE Chunk8 load_shared_8(uint32_t address) {
  Chunk8 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.word[0]), "=r"(value.word[1]) : "r"(address) : "memory");
  return value;
}
FKL_DEVICE Chunk16 load_shared_16(uint32_t address) {
  Chunk16 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address)
               : "memory");
  return value;
}
FKL_DEVICE float load_shared_f32(uint32_t address) { return __uint_as_float(load_shared_u32(address)); }
FKL_DEVICE void store_shared_u16(uint32_t address, uint16_t value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
FKL_DEVICE void store_shared_u32(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
FKL_DEVICE void store_shared_f32(uint32_t address, float value) { store_shared_u32(address, __float_as_uint(value)); }
FKL_DEVICE void store_shared_8(uint32_t address, uint32_t word0, uint32_t word1) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(word0), "r"(word1) : "memory");
}
FKL_DEVICE void store_shared_16(uint32_t address, const Chunk16& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}

// ---- Global memory -------------------------------------------------------------------------------------------------

// Read-only path: for data that no thread of the kernel writes.
FKL_DEVICE uint16_t load_global_u16(const void* pointer) {
  uint16_t value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(pointer));
  return value;
}
FKL_DEVICE uint32_t load_global_u32(const void* pointer) {
  uint32_t value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
FKL_DEVICE Chunk16 load_global_16(const void* pointer) {
  Chunk16 value;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(pointer));
  return value;
}
FKL_DEVICE void store_global_16(void* pointer, const Chunk16& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}
FKL_DEVICE void store_global_u32(void* pointer, uint32_t value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
FKL_DEVICE void store_global_u16(void* pointer, uint16_t value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(pointer), "h"(value) : "memory");
}
// Adds without returning the old value.
FKL_DEVICE void reduce_add_global(float* pointer, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Two and four neighbours at once; the pointer is 8- or 16-byte aligned.
FKL_DEVICE void reduce_add_global_2(float* pointer, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(x), "f"(y) : "memory");
}
FKL_DEVICE void reduce_add_global_4(float* pointer, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
#else
FKL_DEVICE void reduce_add_global_2(float* pointer, float x, float y) {
  reduce_add_global(pointer, x);
  reduce_add_global(pointer + 1, y);
}
FKL_DEVICE void reduce_add_global_4(float* pointer, float x, float y, float z, float w) {
  reduce_add_global_2(pointer, x, y);
  reduce_add_global_2(pointer + 2, z, w);
}
#endif
// For counters that order blocks: what was written before the release is seen after the acquire.
FKL_DEVICE int load_acquire(const int* pointer) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
FKL_DEVICE void reduce_add_release(int* pointer, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// ---- Matrix products: acc += a * b; row and column maps of the operands in tile/layout.cuh
// ----------------------------

FKL_DEVICE void mma_m16n8k16_bf16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FKL_DEVICE void mma_m16n8k16_fp16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
FKL_DEVICE void mma_m16n8k8_tf32(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Conversions and special functions -----------------------------------------------------------------------------

// Two floats to two 16-bit values in one register, `low` in the low half; round to nearest even.
FKL_DEVICE uint32_t convert_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
FKL_DEVICE uint32_t convert_fp16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
FKL_DEVICE float convert_from_fp16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
// Rounds to the 10 mantissa bits of TF32, ties away from zero; the result is a float whose low bits are zero.
FKL_DEVICE uint32_t convert_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}
FKL_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FKL_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Synchronisation -----------------------------------------------------------------------------------------------

// Barriers 1 .. 15; 0 is __syncthreads. `num_threads` counts both sides and is a multiple of 32.
FKL_DEVICE void named_barrier_sync(int barrier, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
FKL_DEVICE void named_barrier_arrive(int barrier, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

FKL_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
FKL_DEVICE int shuffle_xor(int value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

}  // namespace fkl

#endif  // FKL_DEVICE_CORE_PTX_CUH_
