// The vector interpreter: runs the instructions of stages 2 and 3 of a program over one row of scores.
//
// Plain data only (see program_ops.h). Decoding, scalars and intervals are in program.h; the loops over lanes are in
// row_ops.inc, compiled once per instruction set and reached through IsaKernels::run_row.
#ifndef FKL_FFI_CPU_ROW_OPS_H_
#define FKL_FFI_CPU_ROW_OPS_H_

#include "cpu/dtype.h"
#include "cpu/program_ops.h"

namespace fkl {

constexpr int kRowWidth = 256;  // lanes of a row register; rows of scores are never wider

union Scalar {
  float f;
  int i;  // also bool: 0 or -1
};

// One operand of a vector instruction: a row register or a scalar slot (value id).
struct RowOperand {
  int index;
  bool is_scalar;
};

// A captured array as the interpreter reads it: row-major, `data` already moved to the vmap element.
struct Capture {
  static constexpr int kMaxRank = 8;
  const void* data;
  DType dtype;
  int rank;
  long long dims[kMaxRank];
  long long strides[kMaxRank];  // in elements
};

struct RowInstruction {
  ProgramOp op;
  ProgramType type;
  int dst;  // row register
  RowOperand a, b, c;
  // kLoad only:
  int capture;
  int num_indices;
  RowOperand indices[Capture::kMaxRank];
  bool unit_stride;  // innermost index is kv + (uniform over the row)
};

struct RowContext {
  float* const* registers;  // register r is a 64-byte aligned row of kRowWidth lanes of 4 bytes
  const Scalar* scalars;    // by value id
  const Capture* captures;
  int kv_idx0;    // global kv index of lane 0
  int num_lanes;  // 1..kRowWidth; lanes up to the next multiple of the vector width may be computed too
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_ROW_OPS_H_
