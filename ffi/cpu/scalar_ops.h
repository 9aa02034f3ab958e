// What each operation of a program computes, on scalars. The row version is in row_ops.inc; the two
// agree to a few units in the last place where libm is involved and exactly elsewhere.
#ifndef FKL_FFI_CPU_SCALAR_OPS_H_
#define FKL_FFI_CPU_SCALAR_OPS_H_

#include "cpu/row_ops.h"

namespace fkl {

// Any operation but const, input and load; operands that it does not have are ignored.
Scalar ComputeScalar(ProgramOp op, Scalar a, Scalar b, Scalar c);

}  // namespace fkl

#endif  // FKL_FFI_CPU_SCALAR_OPS_H_
