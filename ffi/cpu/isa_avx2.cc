// The kernels for CPUs with AVX2, FMA and F16C.
#define FKL_ISA_NS avx2
#define FKL_W 8
#define FKL_STRIP_ROWS 6
// In this order, each needs those before.
#include "cpu/vector.inc"

#include "cpu/row_ops.inc"

#include "cpu/isa_kernels.inc"

namespace fkl {

extern const IsaKernels kKernelsAvx2;
constinit const IsaKernels kKernelsAvx2 = avx2::MakeKernels("avx2");

}  // namespace fkl
