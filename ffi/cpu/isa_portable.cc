// The kernels for every x86-64 CPU (SSE2: products and sums apart).
#define FKL_ISA_NS portable
#define FKL_W 4
#define FKL_STRIP_ROWS 6
// In this order, each needs those before.
#include "cpu/vector.inc"

#include "cpu/row_ops.inc"

#include "cpu/isa_kernels.inc"

namespace fkl {

extern const IsaKernels kKernelsPortable;
constinit const IsaKernels kKernelsPortable = portable::MakeKernels("portable");

}  // namespace fkl
