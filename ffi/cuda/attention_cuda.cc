#include "cuda/attention_cuda.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string_view>

#include "cuda/cuda_launch.h"
#include "cuda/driver.h"
#include "cuda/launch_call.h"
#include "ffi_decode.h"
#include "xla/ffi/api/ffi.h"

namespace fkl {
namespace {

namespace ffi = xla::ffi;
using cuda::Direction;

cuda::CallCode CodeOf(const ffi::Dictionary& attributes) {
  const auto launch = Attribute<ffi::Span<const int32_t>>(attributes, "cuda_launch");
  return {Attribute<std::string_view>(attributes, "cuda_glue"), Attribute<std::string_view>(attributes, "cuda_kernels"),
          Attribute<std::string_view>(attributes, "spec"), std::span(launch.begin(), launch.size())};
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
    // A runtime may call without buffers; then the usual class is taken, and `execute` loads the other if it must.
    const bool aligned = args.size() == 0 || HasAlignedRows(args, rets, attributes);
    const cuda::ScopedContext context(device);
    CodeOf(attributes).Load(aligned, device);
  });
}

template <Direction kDirection>
ffi::Error Execute(void* stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attributes) {
  return Guarded([&] {
    const cuda::CallCode code = CodeOf(attributes);
    const AttentionCall call = DecodeCall(args, rets, attributes);
    cuda::PreparedCall prepared(kDirection, call, code.records());
    cuda::LaunchCall(code, &prepared, device, static_cast<cuda::Stream>(stream));
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
