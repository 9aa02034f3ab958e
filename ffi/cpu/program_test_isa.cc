// The interpreter's entries of one instruction set's table, for program_test.cc: compiled once per set with its flags and
// with -DFKL_W=... -DFKL_ISA_NS=...
#include "cpu/vector.inc"
#include "cpu/row_ops.inc"
#include "cpu/isa.h"

#define FKL_CONCAT_(a, b) a##b
#define FKL_CONCAT(a, b) FKL_CONCAT_(a, b)

void FKL_CONCAT(FillTable_, FKL_ISA_NS)(fkl::IsaKernels* table) {
  table->vector_width = FKL_W;
  table->run_row = fkl::FKL_ISA_NS::RunRow;
  table->row_to_bits = fkl::FKL_ISA_NS::RowToBits;
  table->select_row = fkl::FKL_ISA_NS::SelectRow;
}
