// Glue to cubin with NVRTC; needs neither GPU nor driver.
#ifndef FKL_FFI_CUDA_COMPILE_H_
#define FKL_FFI_CUDA_COMPILE_H_

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fkl::cuda {

struct Compiled {
  std::string cubin;
  std::string log;
  double seconds = 0;
};

// What ptxas says about a kernel.
struct KernelUse {
  std::string name;
  int registers = 0;
  int spill_bytes = 0;  // stores and loads
  int stack_bytes = 0;
};
struct LogFacts {
  std::vector<KernelUse> kernels;
  std::vector<std::string> warnings;
};
LogFacts ParseLog(std::string_view log);

// All headers of the device folder: path below it and text.
struct Headers {
  std::string dir;
  std::vector<std::pair<std::string, std::string>> files;  // sorted
  std::string digest;
};
// Read once per folder; throws a CudaError if there are none.
std::shared_ptr<const Headers> DeviceHeaders();

// "sm_90a" for 90: the exact GPU, or the newest one of its generation that this NVRTC knows. The
// code for 9.0 and 10.0 may use what later GPUs lack, and is made for no other anyway.
std::string ArchName(int arch);

std::vector<std::string> CompileOptions(std::string_view arch, bool aligned);

// Throws a CudaError with the first errors of the log, and where the source was kept. `origin` says
// what the glue was made from, for that text.
Compiled Compile(const std::string& glue, const std::string& arch, bool aligned, std::string_view origin);

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_COMPILE_H_
