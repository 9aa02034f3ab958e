// Element types of operands, as plain data.
#ifndef FKL_FFI_CPU_DTYPE_H_
#define FKL_FFI_CPU_DTYPE_H_

namespace fkl {

enum class DType : int { kF32, kBF16, kF16, kF64, kBool, kS8, kU8, kS16, kU16, kS32, kU32, kS64 };

}  // namespace fkl

#endif  // FKL_FFI_CPU_DTYPE_H_
