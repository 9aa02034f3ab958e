// The vector interpreter: runs the instructions of stages 2 and 3 of a program over one row of
// scores.
//
// Plain data only (see program_ops.h). Decoding, scalars and intervals are in program.h; the loops
// over lanes are in row_ops.inc, compiled once per instruction set and reached through
// IsaKernels::run_row.
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

// Instructions of the interpreter beyond ProgramOp: what decoding fuses. They continue its numbers.
enum RowOp : int {
  kRowFms = kNumProgramOps,  // a * b - c
  kRowFnma,                  // c - a * b
  kRowKvAffine,              // i32: kv and a scalar `a` in one of the forms below
  kRowKvAffineF,             // the same, converted to f32
};
enum KvForm : int { kAPlusKv, kAMinusKv, kKvMinusA };

// One operand of a vector instruction: a row register, a scalar slot (value id), or the row of kv
// indices itself, which then is never written to memory.
enum OperandKind : int { kRegister, kScalar, kKv };
struct RowOperand {
  int index;
  OperandKind kind;
};

// A captured array as the interpreter reads it: row-major, `data` already moved to the vmap
// element.
struct Capture {
  static constexpr int kMaxRank = 8;
  const void* data;
  DType dtype;
  int rank;
  long long dims[kMaxRank];
  long long strides[kMaxRank];  // in elements
};

struct RowInstruction {
  int op;  // ProgramOp or RowOp
  ProgramType type;
  int dst;  // row register
  RowOperand a, b, c;
  KvForm kv_form;  // kRowKvAffine*
  // kLoad only:
  int capture;
  int num_indices;
  RowOperand indices[Capture::kMaxRank];
  bool unit_stride;  // innermost index is kv + (uniform over the row), the others are scalars
};

struct RowContext {
  float* const* registers;  // register r is a 64-byte aligned row of kRowWidth lanes of 4 bytes
  const Scalar* scalars;    // by value id
  const Capture* captures;
  int kv_idx0;    // global kv index of lane 0
  int num_lanes;  // 1..kRowWidth; lanes up to the next multiple of the vector width may be computed
                  // too
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_ROW_OPS_H_
