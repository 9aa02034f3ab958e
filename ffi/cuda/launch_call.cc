#include "cuda/launch_call.h"

#include <algorithm>

namespace fkl::cuda {
namespace {

void Zero(const Driver& driver, const std::vector<Memory>& parts, Stream stream) {
  for (const Memory& part : parts) {
    if (part.bytes == 0) continue;
    driver.Check(driver.cuMemsetD8Async(reinterpret_cast<DevicePtr>(part.data), 0, part.bytes, stream),
                 "cuMemsetD8Async");
  }
}

void Encode(const Driver& driver, const MapSource& source) {
  if (driver.cuTensorMapEncodeTiled == nullptr) {
    throw CudaError("the driver has no cuTensorMapEncodeTiled; it is too old for this GPU's kernels");
  }
  const int64_t itemsize = SizeOf(source.dtype);
  unsigned long long dims[4], strides[3];
  unsigned box[4];
  const unsigned element_strides[] = {1, 1, 1, 1};
  int64_t stride = itemsize;
  for (size_t axis = 0; axis < 4; ++axis) {
    const int64_t size = axis == 3 ? source.num_outer() : source.dims[axis];
    dims[axis] = static_cast<unsigned long long>(size);
    box[axis] = static_cast<unsigned>(source.box[axis]);
    if (axis > 0) strides[axis - 1] = static_cast<unsigned long long>(stride);
    stride *= size;
  }
  const int data_type = source.dtype == DType::kBF16  ? kTensorMapBFloat16
                        : source.dtype == DType::kF16 ? kTensorMapFloat16
                                                      : kTensorMapFloat32;
  const int64_t span = source.box[0] * itemsize;
  const int swizzle = span == 128 ? kSwizzle128 : span == 64 ? kSwizzle64 : span == 32 ? kSwizzle32 : kSwizzleNone;
  driver.Check(driver.cuTensorMapEncodeTiled(reinterpret_cast<TensorMapPtr>(source.map), data_type, 4, *source.data,
                                             dims, strides, box, element_strides, 0, swizzle, kL2Promotion128, 0),
               "cuTensorMapEncodeTiled");
}

}  // namespace

CallCode::CallCode(std::string_view glue, std::string_view names, std::string_view origin,
                   std::span<const int32_t> launch)
    : glue_(glue), origin_(origin), records_(DecodeLaunch(launch)) {
  // The names of all classes follow each other; what is too much stays with the last and is complained about there.
  for (const LaunchRecord& record : records_.classes) {
    KernelNames& own = classes_.emplace_back();
    size_t end = 0;
    for (const KernelRecord& kernel : record.kernels) {
      own.shared_bytes.push_back(kernel.shared_bytes);
      end = std::min(names.find(' ', end), names.size() - 1) + 1;
    }
    if (classes_.size() == records_.classes.size()) end = names.size();
    own.names = names.substr(0, end);
    names.remove_prefix(end);
    if (own.names.ends_with(' ')) own.names.remove_suffix(1);
  }
}

const LoadedKernels& CallCode::Load(bool aligned, int device) const {
  const KernelNames& own = aligned ? classes_.front() : classes_.back();
  return GetKernels({.glue = glue_,
                     .names = own.names,
                     .origin = origin_,
                     .shared_bytes = own.shared_bytes,
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
    for (const MapSource& map : call->maps()) Encode(driver, map);
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
