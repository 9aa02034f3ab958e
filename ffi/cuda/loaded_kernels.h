// Kernels in a device's memory, by the glue they were made from.
#ifndef FKL_FFI_CUDA_LOADED_KERNELS_H_
#define FKL_FFI_CUDA_LOADED_KERNELS_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/driver.h"

namespace fkl::cuda {

// What names a call's kernels; the views must live as long as the request.
struct KernelRequest {
  std::string_view glue;
  std::string_view names;   // of entry points in launch order, separated by blanks
  std::string_view origin;  // the call's specification, for error texts
  std::span<const int> shared_bytes;
  bool aligned = true;
  int device = 0;
};

struct LoadedKernels {
  std::vector<Function> functions;
};

// Loads at the first request, compiling if need be; afterwards a look-up of about a microsecond.
// The device's context must be current. What is returned stays valid for the life of the process.
const LoadedKernels& GetKernels(const KernelRequest& request);
int64_t NumLoadedKernels();

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_LOADED_KERNELS_H_
