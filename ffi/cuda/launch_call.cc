#include "cuda/launch_call.h"

namespace fkl::cuda {
namespace {

void Zero(const Driver& driver, const std::vector<Memory>& parts, Stream stream) {
  for (const Memory& part : parts) {
    if (part.bytes == 0) continue;
    driver.Check(driver.cuMemsetD8Async(reinterpret_cast<DevicePtr>(part.data), 0, part.bytes, stream),
                 "cuMemsetD8Async");
  }
}

}  // namespace

CallCode::CallCode(std::string_view glue, std::string_view names, std::string_view origin,
                   std::span<const int32_t> launch)
    : glue_(glue), names_(names), origin_(origin), record_(DecodeLaunch(launch)) {
  for (const KernelRecord& kernel : record_.kernels) shared_bytes_.push_back(kernel.shared_bytes);
}

const LoadedKernels& CallCode::Load(bool aligned, int device) const {
  return GetKernels({.glue = glue_,
                     .names = names_,
                     .origin = origin_,
                     .shared_bytes = shared_bytes_,
                     .aligned = aligned,
                     .device = device});
}

void LaunchCall(const CallCode& code, PreparedCall* call, int device, Stream stream) {
  const Driver& driver = GetDriver();
  const ScopedContext context(device);
  Zero(driver, call->zeroed_once(), stream);
  if (!call->has_kernels()) return;
  const LoadedKernels& kernels = code.Load(call->is_aligned(), device);
  for (int64_t round = 0; round < call->num_rounds(); ++round) {
    call->SetRound(round);
    Zero(driver, call->zeroed(), stream);
    for (size_t k = 0; k < kernels.functions.size(); ++k) {
      const Grid& grid = call->grids()[k];
      void* arguments[] = {call->params()};
      driver.Check(driver.cuLaunchKernel(kernels.functions[k], grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared_bytes,
                                         stream, arguments, nullptr),
                   "cuLaunchKernel");
    }
  }
}

}  // namespace fkl::cuda
