// Checks of operands by name, with texts that say what was given and what is allowed.
#ifndef FKL_FFI_FFI_CHECKS_H_
#define FKL_FFI_FFI_CHECKS_H_

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpu/dtype.h"

namespace fkl {

// Thrown by the checks, turned into an XLA error by the handlers; never leaves the library.
class InvalidCall : public std::invalid_argument {
 public:
  explicit InvalidCall(const std::string& what) : std::invalid_argument("attention: " + what) {}
};

inline const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "float32";
    case DType::kBF16: return "bfloat16";
    case DType::kF16: return "float16";
    case DType::kF64: return "float64";
    case DType::kBool: return "bool";
    case DType::kS8: return "int8";
    case DType::kU8: return "uint8";
    case DType::kS16: return "int16";
    case DType::kU16: return "uint16";
    case DType::kS32: return "int32";
    case DType::kU32: return "uint32";
    case DType::kS64: return "int64";
  }
  return "unknown";
}

inline std::string ShapeText(std::span<const int64_t> dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

// Sizes that the kernels keep in an int; the limit leaves room for rounding up.
// Texts are views: these run in every call, and mostly have nothing to say.
inline int CheckedInt(int64_t size, std::string_view what, int64_t largest = int64_t{1} << 30) {
  if (size < 0 || size > largest) {
    throw InvalidCall(std::string(what) + " is " + std::to_string(size) + ", allowed are 0 to " +
                      std::to_string(largest));
  }
  return static_cast<int>(size);
}

inline void CheckSame(std::string_view what, int64_t value, std::string_view other_what, int64_t other) {
  if (value != other) {
    throw InvalidCall(std::string(what) + " is " + std::to_string(value) + ", " + std::string(other_what) + " is " +
                      std::to_string(other) + "; they must match");
  }
}

}  // namespace fkl

#endif  // FKL_FFI_FFI_CHECKS_H_
