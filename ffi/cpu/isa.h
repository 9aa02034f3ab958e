// The table of kernels that one instruction set exports. Plain data only (see program_ops.h).
//
// isa_portable.cc, isa_avx2.cc, isa_avx512.cc and isa_avx512_bf16.cc each fill one table from the same sources
// (isa_kernels.inc, row_ops.inc); SelectIsa() picks once per process what the CPU has.
#ifndef FKL_FFI_CPU_ISA_H_
#define FKL_FFI_CPU_ISA_H_

#include "cpu/row_ops.h"

namespace fkl {

struct IsaKernels {
  const char* name;
  int vector_width;  // floats per vector register

  // Runs instructions [begin, end) of a program over one row.
  void (*run_row)(const RowInstruction* begin, const RowInstruction* end, const RowContext& context);
  // bits[c / 32] bit c % 32 = (row[c] != 0) for c < num_lanes; the rest of the kRowWidth / 32 words become 0.
  void (*row_to_bits)(const int* row, int num_lanes, unsigned* bits);
  // row[c] = bit c of bits ? row[c] : 0, for c < num_lanes (a select: NaN in a dead lane becomes 0).
  void (*select_row)(float* row, const unsigned* bits, int num_lanes);

  // ... the attention kernels' own entries follow here.
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_ISA_H_
