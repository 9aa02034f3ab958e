#include "cuda/attention_cuda.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "cuda/cuda_launch.h"
#include "cuda/driver.h"
#include "cuda/loaded_kernels.h"
#include "ffi_decode.h"
#include "xla/ffi/api/ffi.h"

namespace fkl {
namespace {

namespace ffi = xla::ffi;
using cuda::Direction;

// The attributes that say what to launch.
struct LaunchAttributes {
  explicit LaunchAttributes(const ffi::Dictionary& attributes)
      : glue(Attribute<std::string_view>(attributes, "cuda_glue")),
        names(Attribute<std::string_view>(attributes, "cuda_kernels")),
        origin(Attribute<std::string_view>(attributes, "spec")) {
    const auto numbers = Attribute<ffi::Span<const int32_t>>(attributes, "cuda_launch");
    record = cuda::DecodeLaunch({numbers.begin(), numbers.size()});
    for (const cuda::KernelRecord& kernel : record.kernels) shared_bytes.push_back(kernel.shared_bytes);
  }

  const cuda::LoadedKernels& Kernels(bool aligned, int device) const {
    return cuda::GetKernels({.glue = glue,
                             .names = names,
                             .origin = origin,
                             .shared_bytes = shared_bytes,
                             .aligned = aligned,
                             .device = device});
  }

  std::string_view glue, names, origin;
  cuda::LaunchRecord record;
  std::vector<int> shared_bytes;
};

void Zero(const cuda::Driver& driver, const std::vector<cuda::Memory>& parts, cuda::Stream stream) {
  for (const cuda::Memory& part : parts) {
    if (part.bytes == 0) continue;
    driver.Check(driver.cuMemsetD8Async(reinterpret_cast<cuda::DevicePtr>(part.data), 0, part.bytes, stream),
                 "cuMemsetD8Async");
  }
}

// PreparedCall::is_aligned without preparing anything: `initialize` runs before every execution, usually in vain.
bool HasAlignedRows(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const ffi::Dictionary& attributes) {
  static constexpr std::string_view kRoles[] = {"query", "key", "value", "out", "dout"};
  bool aligned = true;
  const auto look = [&](std::string_view role, const ffi::AnyBuffer& buffer) {
    if (std::find(std::begin(kRoles), std::end(kRoles), role) == std::end(kRoles)) return;
    if (buffer.element_count() == 0) return;
    const auto row_bytes =
        buffer.size_bytes() / (buffer.element_count() / static_cast<size_t>(buffer.dimensions().back()));
    aligned = aligned && cuda::IsRowAligned(buffer.untyped_data(), static_cast<int64_t>(row_bytes));
  };
  ForEachRole(Attribute<std::string_view>(attributes, "operands"), [&](std::string_view role, size_t index) {
    auto buffer = args.get<ffi::AnyBuffer>(index);
    if (buffer.has_value()) look(role, *buffer);
  });
  ForEachRole(Attribute<std::string_view>(attributes, "results"), [&](std::string_view role, size_t index) {
    auto buffer = rets.get<ffi::AnyBuffer>(index);
    if (buffer.has_value()) look(role, **buffer);
  });
  return aligned;
}

ffi::Error Initialize(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
  return Guarded([&] {
    const LaunchAttributes launch(attributes);
    // A runtime may call without buffers; then the usual class is taken, and `execute` loads the other if it must.
    const bool aligned = args.size() == 0 || HasAlignedRows(args, rets, attributes);
    const cuda::ScopedContext context(device);
    launch.Kernels(aligned, device);
  });
}

template <Direction kDirection>
ffi::Error Execute(void* stream_handle, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  return Guarded([&] {
    const LaunchAttributes launch(attributes);
    const AttentionCall call = DecodeCall(args, rets, attributes);
    cuda::PreparedCall prepared(kDirection, call, launch.record);
    const cuda::Driver& driver = cuda::GetDriver();
    const cuda::ScopedContext context(device);
    auto* stream = static_cast<cuda::Stream>(stream_handle);
    Zero(driver, prepared.zeroed_once(), stream);
    if (!prepared.has_kernels()) return;
    const cuda::LoadedKernels& kernels = launch.Kernels(prepared.is_aligned(), device);
    for (int64_t round = 0; round < prepared.num_rounds(); ++round) {
      prepared.SetRound(round);
      Zero(driver, prepared.zeroed(), stream);
      for (size_t k = 0; k < kernels.functions.size(); ++k) {
        const cuda::Grid& grid = prepared.grids()[k];
        void* arguments[] = {prepared.params()};
        driver.Check(driver.cuLaunchKernel(kernels.functions[k], grid.blocks, 1, 1, grid.threads, 1, 1,
                                           grid.shared_bytes, stream, arguments, nullptr),
                     "cuLaunchKernel");
      }
    }
  });
}

constexpr auto kExecuteForward = Execute<Direction::kForward>;
constexpr auto kExecuteBackward = Execute<Direction::kBackward>;

#define FKL_INITIALIZE ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs()
#define FKL_EXECUTE \
  ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER(kInitializeHandler, Initialize, FKL_INITIALIZE);
XLA_FFI_DEFINE_HANDLER(kForwardExecuteHandler, kExecuteForward, FKL_EXECUTE, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackwardExecuteHandler, kExecuteBackward, FKL_EXECUTE, {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Error* InitializeAttentionCuda(XLA_FFI_CallFrame* frame) { return kInitializeHandler(frame); }
XLA_FFI_Error* AttentionForwardCuda(XLA_FFI_CallFrame* frame) { return kForwardExecuteHandler(frame); }
XLA_FFI_Error* AttentionBackwardCuda(XLA_FFI_CallFrame* frame) { return kBackwardExecuteHandler(frame); }

}  // namespace fkl
