// Which instruction set the kernels of this process use.
#ifndef FKL_FFI_CPU_ISA_SELECT_H_
#define FKL_FFI_CPU_ISA_SELECT_H_

#include <string>
#include <vector>

#include "cpu/isa.h"

namespace fkl {

struct IsaChoice {
  const IsaKernels* kernels = nullptr;
  std::string error;  // why there is none
};

// Decided at the first call (the module makes it when it is imported) and kept: the widest set that
// this CPU has, or the one named by the environment variable FKL_JAX_CPU_ISA.
const IsaChoice& SelectIsa();

// The sets that this CPU and operating system support, widest last.
std::vector<const IsaKernels*> SupportedIsas();

}  // namespace fkl

#endif  // FKL_FFI_CPU_ISA_SELECT_H_
