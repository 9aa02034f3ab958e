// Element types of operands, as plain data.
#ifndef FKL_FFI_CPU_DTYPE_H_
#define FKL_FFI_CPU_DTYPE_H_

namespace fkl {

enum class DType : int { kF32, kBF16, kF16, kF64, kBool, kS8, kU8, kS16, kU16, kS32, kU32, kS64 };

inline int SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kS8:
    case DType::kU8: return 1;
    case DType::kBF16:
    case DType::kF16:
    case DType::kS16:
    case DType::kU16: return 2;
    case DType::kF64:
    case DType::kS64: return 8;
    default: return 4;
  }
}

}  // namespace fkl

#endif  // FKL_FFI_CPU_DTYPE_H_
