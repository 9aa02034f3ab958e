// The CPU's handlers: from a decoded call to an AttentionProblem.
#include "attention_handlers.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "attention_call.h"
#include "cpu/attention_cpu.h"
#include "cpu/isa_select.h"
#include "ffi_checks.h"
#include "ffi_decode.h"
#include "xla/ffi/api/ffi.h"

namespace fkl {
namespace {

namespace ffi = xla::ffi;

// How an array whose leading axes are `leading`, each as in `grid` or 1, is addressed by the elements of the grid.
OuterOffsets OffsetsOf(std::span<const int64_t> leading, std::span<const int64_t> grid, int64_t inner_size) {
  std::vector<int64_t> strides(grid.size());
  bool is_full = true, is_single = true;
  int64_t stride = inner_size;
  for (size_t axis = grid.size(); axis-- > 0;) {
    strides[axis] = leading[axis] == 1 ? 0 : stride;
    stride *= leading[axis];
    is_full = is_full && leading[axis] == grid[axis];
    is_single = is_single && leading[axis] == 1;
  }
  if (is_full) return {.step = inner_size, .table = {}};
  if (is_single) return {.step = 0, .table = {}};
  OuterOffsets offsets;
  offsets.table.resize(static_cast<size_t>(Product(grid)));
  for (size_t element = 0; element < offsets.table.size(); ++element) {
    auto rest = static_cast<int64_t>(element);
    for (size_t axis = grid.size(); axis-- > 0; rest /= grid[axis]) {
      offsets.table[element] += rest % grid[axis] * strides[axis];
    }
  }
  return offsets;
}

// A call in the terms of the CPU kernels.
class CpuCall {
 public:
  CpuCall(const AttentionCall& call, const ffi::Dictionary& attributes) : call_(call), attributes_(attributes) {}

  AttentionProblem Problem() const;
  ForwardResults Forward() const;
  BackwardOperands BackwardInputs() const;
  BackwardResults Backward(const AttentionProblem& problem) const;

 private:
  OuterOffsets Offsets(std::string_view role, const Dims& dims) const;
  // Without data if the role is absent.
  Operand Given(std::string_view role) const;
  Result Asked(std::string_view role) const;
  BroadcastStrides InnerStrides(std::string_view role) const;
  void DecodePrograms(AttentionProblem* problem) const;

  const AttentionCall& call_;
  const ffi::Dictionary& attributes_;
};

OuterOffsets CpuCall::Offsets(std::string_view role, const Dims& dims) const {
  const auto split = dims.begin() + static_cast<std::ptrdiff_t>(call_.NumOuterAxes(role));
  Dims leading(dims.begin(), split);
  leading.resize(call_.outer_dims().size(), 1);
  return OffsetsOf(leading, call_.outer_dims(), Product(Dims(split, dims.end())));
}

Operand CpuCall::Given(std::string_view role) const {
  const Array* array = call_.Operand(role);
  if (array == nullptr) return {};
  return {AddressOf(*array), array->dtype, Offsets(role, array->dims)};
}

Result CpuCall::Asked(std::string_view role) const {
  const Array* array = call_.Result(role);
  if (array == nullptr) return {};
  return {AddressOf(*array), array->dtype, Offsets(role, array->dims), Product(array->dims)};
}

BroadcastStrides CpuCall::InnerStrides(std::string_view role) const {
  const auto [head, row, column] = call_.InnerStrides(call_.Required(role).dims);
  return {.head = head, .row = row, .column = column};
}

AttentionProblem CpuCall::Problem() const {
  const IsaChoice& isa = SelectIsa();
  if (isa.kernels == nullptr) throw InvalidCall(isa.error);
  AttentionProblem p;
  p.isa = isa.kernels;
  p.deterministic = Attribute<bool>(attributes_, "deterministic");
  p.full_precision = Attribute<bool>(attributes_, "full_precision");
  p.num_vmap = Product(call_.vmap_dims());
  p.num_batch = Product(call_.batch_dims());
  p.q_seq_len = CheckedInt(call_.q_seq_len(), "the query length");
  p.kv_seq_len = CheckedInt(call_.kv_seq_len(), "the key length");
  p.num_q_heads = CheckedInt(call_.num_q_heads(), "the number of query heads");
  p.num_kv_heads = CheckedInt(call_.num_kv_heads(), "the number of key heads");
  p.head_dim = static_cast<int>(call_.head_dim());
  p.value_head_dim = static_cast<int>(call_.value_head_dim());

  p.query = Given("query");
  p.key = Given("key");
  p.value = Given("value");
  call_.Required("scale");
  p.scale = Given("scale");
  p.bias = Given("bias");
  if (p.bias) p.bias_strides = InnerStrides("bias");
  p.q_segment_ids = Given("q_segment_ids");
  p.kv_segment_ids = Given("kv_segment_ids");
  p.q_seq_lengths = Given("q_seq_lengths");
  p.kv_seq_lengths = Given("kv_seq_lengths");
  p.q_offset = Given("q_offset");
  p.kv_offset = Given("kv_offset");
  p.sinks = Given("sinks");
  p.batch_index = Given("batch_index");
  p.head_index = Given("head_index");
  p.block_mask = Given("block_mask");
  if (p.block_mask) {
    p.block_q = call_.blocks().q;
    p.block_kv = call_.blocks().kv;
    // Only heads are broadcast: a single row or column of blocks is no broadcast axis.
    p.block_mask_strides = InnerStrides("block_mask");
    p.block_mask_strides.row = call_.num_kv_blocks();
  }
  DecodePrograms(&p);
  return p;
}

void CpuCall::DecodePrograms(AttentionProblem* p) const {
  p->num_captures = call_.num_captures();
  p->captures.resize(static_cast<size_t>(p->num_vmap * p->num_captures));
  for (int number = 0; number < p->num_captures; ++number) {
    const std::string role = "capture." + std::to_string(number);
    const Array& array = call_.Capture(number);
    const auto split = array.dims.begin() + static_cast<std::ptrdiff_t>(call_.num_vmap_axes());
    Capture capture = {};
    capture.dtype = array.dtype;
    capture.rank = CheckedInt(array.dims.end() - split, "the rank of " + role, Capture::kMaxRank);
    long long size = 1;
    for (int axis = capture.rank; axis-- > 0;) {
      capture.dims[axis] = split[axis];
      capture.strides[axis] = size;
      size *= split[axis];
    }
    const OuterOffsets offsets = OffsetsOf(Dims(array.dims.begin(), split), call_.vmap_dims(), size);
    for (int64_t element = 0; element < p->num_vmap; ++element) {
      capture.data = static_cast<const char*>(AddressOf(array)) + offsets.At(element) * SizeOf(array.dtype);
      p->captures[static_cast<size_t>(element * p->num_captures + number)] = capture;
    }
  }
  for (const auto& [name, program] :
       {std::pair<const char*, Program*>("score_code", &p->score), {"mask_code", &p->mask}}) {
    const auto code = Attribute<ffi::Span<const int32_t>>(attributes_, name);
    if (code.size() == 0 || p->num_vmap == 0) continue;
    const std::string error =
        program->Decode(code.begin(), static_cast<int64_t>(code.size()), p->captures.data(), p->num_captures);
    if (!error.empty()) throw InvalidCall(std::string(name) + " is damaged: " + error);
  }
}

ForwardResults CpuCall::Forward() const {
  call_.CheckForwardResults();
  ForwardResults r;
  r.out = Asked("out");
  const Array& lse = *call_.Result("lse");
  r.lse = {
      AddressOf(lse), DType::kF32, {.step = call_.num_q_heads() * call_.q_seq_len(), .table = {}}, Product(lse.dims)};
  return r;
}

BackwardOperands CpuCall::BackwardInputs() const {
  for (const char* role : {"out", "dout", "lse"}) call_.Required(role);
  return {.out = Given("out"), .dout = Given("dout"), .lse = Given("lse"), .dlse = Given("dlse")};
}

BackwardResults CpuCall::Backward(const AttentionProblem& problem) const {
  call_.CheckBackwardResults();
  BackwardResults r;
  r.dquery = Asked("query");
  r.dkey = Asked("key");
  r.dvalue = Asked("value");
  r.dscale = Asked("scale");
  r.dbias = Asked("bias");
  for (int number = 0; number < problem.num_captures; ++number) {
    r.dcaptures.push_back(Asked("capture." + std::to_string(number)));
  }
  if (!problem.score.empty() && !problem.score.has_derivative() && problem.num_vmap > 0) {
    throw InvalidCall("score_code of the backward call has no derivative");
  }
  return r;
}

Executor ExecutorOf(ffi::ThreadPool& pool) {
  return {.num_workers = static_cast<int>(std::clamp<int64_t>(pool.num_threads(), 1, 1024)),
          .schedule = [&pool](std::function<void()> work) { pool.Schedule(std::move(work)); }};
}

ffi::Error ForwardCpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  return Guarded([&] {
    const AttentionCall decoded = DecodeCall(args, rets, attributes);
    const CpuCall call(decoded, attributes);
    const AttentionProblem problem = call.Problem();
    AttentionForward(problem, call.Forward(), ExecutorOf(pool));
  });
}

ffi::Error BackwardCpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return Guarded([&] {
    const AttentionCall decoded = DecodeCall(args, rets, attributes);
    const CpuCall call(decoded, attributes);
    const AttentionProblem problem = call.Problem();
    AttentionBackward(problem, call.BackwardInputs(), call.Backward(problem), ExecutorOf(pool));
  });
}

XLA_FFI_DEFINE_HANDLER(kForwardCpu, ForwardCpu,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kBackwardCpu, BackwardCpu,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

XLA_FFI_Error* AttentionForwardCpu(XLA_FFI_CallFrame* call_frame) { return kForwardCpu(call_frame); }
XLA_FFI_Error* AttentionBackwardCpu(XLA_FFI_CallFrame* call_frame) { return kBackwardCpu(call_frame); }

}  // namespace fkl
