#include "cpu/isa_select.h"

#include <cstdlib>

namespace fkl {

extern const IsaKernels kKernelsPortable;
extern const IsaKernels kKernelsAvx2;
extern const IsaKernels kKernelsAvx512;
extern const IsaKernels kKernelsAvx512Bf16;

// Includes the operating system's part: whether it saves the wide registers.
std::vector<const IsaKernels*> SupportedIsas() {
  std::vector<const IsaKernels*> kernels = {&kKernelsPortable};
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    kernels.push_back(&kKernelsAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      kernels.push_back(&kKernelsAvx512);
      if (__builtin_cpu_supports("avx512bf16")) kernels.push_back(&kKernelsAvx512Bf16);
    }
  }
  return kernels;
}

namespace {

IsaChoice Choose() {
  const std::vector<const IsaKernels*> supported = SupportedIsas();
  const char* wanted = std::getenv("FKL_JAX_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return {.kernels = supported.back(), .error = {}};
  std::string names;
  for (const IsaKernels* kernels : supported) {
    if (std::string(kernels->name) == wanted) return {.kernels = kernels, .error = {}};
    names += names.empty() ? "" : ", ";
    names += kernels->name;
  }
  return {.kernels = nullptr,
          .error = "FKL_JAX_CPU_ISA is '" + std::string(wanted) + "'; this CPU supports: " + names +
                   ". Choose one of these or unset the variable"};
}

}  // namespace

const IsaChoice& SelectIsa() {
  static const IsaChoice choice = Choose();
  return choice;
}

}  // namespace fkl
