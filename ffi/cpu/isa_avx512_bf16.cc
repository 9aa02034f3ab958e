// The kernels for CPUs with AVX-512 that also multiply bf16 pairs (AVX512_BF16).
#define FKL_ISA_NS avx512_bf16
#define FKL_W 16
#define FKL_STRIP_ROWS 8
#define FKL_HAS_BF16
// In this order, each needs those before.
#include "cpu/vector.inc"

#include "cpu/row_ops.inc"

#include "cpu/isa_kernels.inc"

namespace fkl {

extern const IsaKernels kKernelsAvx512Bf16;
constinit const IsaKernels kKernelsAvx512Bf16 = avx512_bf16::MakeKernels("avx512_bf16");

}  // namespace fkl
