// From a prepared call to work on a stream.
#ifndef FKL_FFI_CUDA_LAUNCH_CALL_H_
#define FKL_FFI_CUDA_LAUNCH_CALL_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/cuda_launch.h"
#include "cuda/driver.h"
#include "cuda/loaded_kernels.h"

namespace fkl::cuda {

// The kernels of a call as its attributes name them; the texts must outlive it.
class CallCode {
 public:
  // `origin` is the call's specification, for error texts.
  CallCode(std::string_view glue, std::string_view names, std::string_view origin, std::span<const int32_t> launch);

  const LaunchRecords& records() const { return records_; }
  // Loads them at the first call. The device's context must be current.
  const LoadedKernels& Load(bool aligned, int device) const;

 private:
  struct KernelNames {
    std::string_view names;
    std::vector<int> shared_bytes;
  };

  std::string_view glue_, origin_;
  LaunchRecords records_;
  std::vector<KernelNames> classes_;  // as in the records
};

// Zeroes what the kernels expect to be zero and launches them: no allocation on the device, no synchronisation.
void LaunchCall(const CallCode& code, PreparedCall* call, int device, Stream stream);

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_LAUNCH_CALL_H_
