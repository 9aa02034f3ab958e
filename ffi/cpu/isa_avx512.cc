// The kernels for CPUs with AVX-512 F, BW, VL and DQ.
#define FKL_ISA_NS avx512
#define FKL_W 16
#define FKL_STRIP_ROWS 8
// In this order, each needs those before.
#include "cpu/vector.inc"

#include "cpu/row_ops.inc"

#include "cpu/isa_kernels.inc"

namespace fkl {

extern const IsaKernels kKernelsAvx512;
constinit const IsaKernels kKernelsAvx512 = avx512::MakeKernels("avx512");

}  // namespace fkl
