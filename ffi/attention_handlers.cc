// Decodes a custom call into an AttentionProblem, checking everything: a damaged or foreign module must get an error, never
// a crash.
#include "attention_handlers.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/attention_cpu.h"
#include "cpu/isa_select.h"
#include "ffi_checks.h"
#include "xla/ffi/api/ffi.h"

namespace fkl {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kAbi = 1;
constexpr int64_t kMaxHeadDim = 1024;

using Dims = std::vector<int64_t>;

struct Array {
  void* data;
  DType dtype;
  Dims dims;
};

DType DTypeOf(ffi::DataType type, const std::string& role) {
  switch (type) {
    case ffi::F32: return DType::kF32;
    case ffi::BF16: return DType::kBF16;
    case ffi::F16: return DType::kF16;
    case ffi::F64: return DType::kF64;
    case ffi::PRED: return DType::kBool;
    case ffi::S8: return DType::kS8;
    case ffi::U8: return DType::kU8;
    case ffi::S16: return DType::kS16;
    case ffi::U16: return DType::kU16;
    case ffi::S32: return DType::kS32;
    case ffi::U32: return DType::kU32;
    case ffi::S64: return DType::kS64;
    default: throw InvalidCall(role + " has an element type that the CPU kernels do not read");
  }
}

Array ArrayOf(const ffi::AnyBuffer& buffer, const std::string& role) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), DTypeOf(buffer.element_type(), role), Dims(dims.begin(), dims.end())};
}

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const size_t blank = text.find(' ');
    words.emplace_back(text.substr(0, blank));
    text = blank == std::string_view::npos ? std::string_view() : text.substr(blank + 1);
  }
  return words;
}

template <class T>
T Attribute(const ffi::Dictionary& attributes, const char* name) {
  auto value = attributes.get<T>(name);
  if (value.has_error()) {
    throw InvalidCall("attribute '" + std::string(name) + "' is missing or has another type");
  }
  return value.value();
}

int64_t Product(std::span<const int64_t> dims) {
  int64_t product = 1;
  for (const int64_t dim : dims) product *= dim;
  return product;
}

// An axis of a role's shape after *V.
struct Axis {
  int64_t size;
  bool may_be_one = false;
};
using Axes = std::vector<Axis>;

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

// A list of one element type.
struct Only {
  DType dtype;
  operator std::span<const DType>() const { return {&dtype, 1}; }
};

// Decoded attributes, arrays by role, and the sizes.
class Call {
 public:
  Call(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const ffi::Dictionary& attributes);

  AttentionProblem Problem() const;
  ForwardResults Forward() const;
  BackwardOperands BackwardInputs() const;
  BackwardResults Backward(const AttentionProblem& problem) const;

 private:
  const Array* Find(const std::string& role) const;
  const Array& Get(const std::string& role) const;
  void FindSizes();
  void CheckKnownRoles() const;
  Axes WithBatch(Axes rest, bool may_be_one = false) const;
  void CheckShape(const std::string& role, const Dims& dims, const Axes& axes, bool has_full_vmap) const;
  static void CheckDType(const std::string& role, DType dtype, std::span<const DType> allowed);
  OuterOffsets Offsets(const Dims& dims, bool has_batch_axes) const;
  // Checked; an Operand without data if the role is absent.
  Operand Given(const std::string& role, const Axes& axes, bool has_batch_axes,
                std::span<const DType> allowed) const;
  Result Asked(const std::string& role, const Axes& axes, bool has_batch_axes, DType dtype) const;
  BroadcastStrides InnerStrides(const Dims& dims) const;
  void DecodePrograms(AttentionProblem* problem) const;

  const ffi::Dictionary& attributes_;
  std::map<std::string, Array> operands_, results_;
  size_t num_vmap_axes_ = 0, num_batch_axes_ = 0;
  Dims vmap_dims_, batch_dims_, outer_dims_;
  int64_t q_seq_len_ = 0, kv_seq_len_ = 0;
  int64_t num_q_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0, value_head_dim_ = 0;
  DType dtype_ = DType::kF32;
};

Call::Call(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const ffi::Dictionary& attributes)
    : attributes_(attributes) {
  const auto abi = Attribute<int64_t>(attributes, "abi");
  if (abi != kAbi) {
    throw InvalidCall("the program was made for version " + std::to_string(abi) +
                      " of the custom call, this library has version " + std::to_string(kAbi) +
                      "; trace or export it again with this version of fkl_jax");
  }
  const auto add = [](std::map<std::string, Array>* arrays, const std::string& role, const auto& buffer) {
    if (!arrays->emplace(role, ArrayOf(buffer, role)).second) throw InvalidCall(role + " is given twice");
  };
  const std::vector<std::string> operands = Split(Attribute<std::string_view>(attributes, "operands"));
  CheckSame("the number of operands", static_cast<int64_t>(args.size()), "the number of their roles",
            static_cast<int64_t>(operands.size()));
  for (size_t i = 0; i < operands.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) throw InvalidCall("operand " + operands[i] + " cannot be decoded");
    add(&operands_, operands[i], buffer.value());
  }
  const std::vector<std::string> results = Split(Attribute<std::string_view>(attributes, "results"));
  CheckSame("the number of results", static_cast<int64_t>(rets.size()), "the number of their roles",
            static_cast<int64_t>(results.size()));
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) throw InvalidCall("result " + results[i] + " cannot be decoded");
    add(&results_, results[i], *buffer.value());
  }
  CheckKnownRoles();
  FindSizes();
}

const Array* Call::Find(const std::string& role) const {
  const auto found = operands_.find(role);
  return found == operands_.end() ? nullptr : &found->second;
}

const Array& Call::Get(const std::string& role) const {
  if (const Array* array = Find(role)) return *array;
  throw InvalidCall("operand '" + role + "' is missing");
}

// An operand that nobody reads would be an argument silently ignored.
void Call::CheckKnownRoles() const {
  static constexpr std::string_view kOperands[] = {
      "query",         "key",            "value",    "scale",     "bias",  "q_segment_ids", "kv_segment_ids",
      "q_seq_lengths", "kv_seq_lengths", "q_offset", "kv_offset", "sinks", "block_mask",    "batch_index",
      "head_index",    "out",            "lse",      "dout",      "dlse"};
  for (const auto& [role, array] : operands_) {
    if (role.starts_with("capture.")) continue;
    if (std::find(std::begin(kOperands), std::end(kOperands), role) == std::end(kOperands)) {
      throw InvalidCall("operand role '" + role + "' is unknown");
    }
  }
  if ((Find("q_segment_ids") == nullptr) != (Find("kv_segment_ids") == nullptr)) {
    throw InvalidCall("q_segment_ids and kv_segment_ids must be given together");
  }
}

void Call::FindSizes() {
  const auto num_batch_dims = Attribute<int64_t>(attributes_, "num_batch_dims");
  const Array& query = Get("query");
  const Array& key = Get("key");
  const Array& value = Get("value");
  const auto rank = static_cast<int64_t>(query.dims.size());
  if (num_batch_dims < 0 || rank < num_batch_dims + 3) {
    throw InvalidCall("query has shape " + ShapeText(query.dims) + "; with num_batch_dims=" +
                      std::to_string(num_batch_dims) + " it needs (*batch, T, N, H)");
  }
  CheckSame("the rank of key", static_cast<int64_t>(key.dims.size()), "the rank of query", rank);
  CheckSame("the rank of value", static_cast<int64_t>(value.dims.size()), "the rank of query", rank);
  num_batch_axes_ = static_cast<size_t>(num_batch_dims);
  num_vmap_axes_ = static_cast<size_t>(rank - num_batch_dims - 3);
  vmap_dims_.assign(num_vmap_axes_, 1);
  for (const auto& [role, array] : operands_) {
    if (array.dims.size() < num_vmap_axes_) {
      throw InvalidCall(role + " has shape " + ShapeText(array.dims) + "; like query it must start with " +
                        std::to_string(num_vmap_axes_) + " vmap axes");
    }
    for (size_t axis = 0; axis < num_vmap_axes_; ++axis) {
      if (array.dims[axis] == 1) continue;
      if (vmap_dims_[axis] != 1) {
        CheckSame("vmap axis " + std::to_string(axis) + " of " + role, array.dims[axis],
                  "that of another operand", vmap_dims_[axis]);
      }
      vmap_dims_[axis] = array.dims[axis];
    }
  }
  const size_t base = num_vmap_axes_ + num_batch_axes_;
  for (size_t axis = num_vmap_axes_; axis < base; ++axis) batch_dims_.push_back(query.dims[axis]);
  outer_dims_ = vmap_dims_;
  outer_dims_.insert(outer_dims_.end(), batch_dims_.begin(), batch_dims_.end());
  q_seq_len_ = query.dims[base];
  num_q_heads_ = query.dims[base + 1];
  head_dim_ = query.dims[base + 2];
  kv_seq_len_ = key.dims[base];
  num_kv_heads_ = key.dims[base + 1];
  value_head_dim_ = value.dims[base + 2];
  dtype_ = query.dtype;
  if (key.dims[base + 2] != head_dim_) {
    throw InvalidCall("key has head_dim " + std::to_string(key.dims[base + 2]) + ", query has " +
                      std::to_string(head_dim_) + "; they must match");
  }
  for (const auto& [what, size] : {std::pair<const char*, int64_t>("head_dim", head_dim_),
                                   {"value_head_dim", value_head_dim_}}) {
    if (size < 1 || size > kMaxHeadDim) {
      throw InvalidCall(std::string(what) + " is " + std::to_string(size) + ", the CPU kernels take 1 to " +
                        std::to_string(kMaxHeadDim));
    }
  }
  if (num_q_heads_ > 0 && (num_kv_heads_ == 0 || num_q_heads_ % num_kv_heads_ != 0)) {
    throw InvalidCall("query has " + std::to_string(num_q_heads_) + " heads, key and value have " +
                      std::to_string(num_kv_heads_) + "; the first must be a multiple of the second");
  }
}

Axes Call::WithBatch(Axes rest, bool may_be_one) const {
  Axes axes;
  for (const int64_t dim : batch_dims_) axes.push_back({dim, may_be_one});
  axes.insert(axes.end(), rest.begin(), rest.end());
  return axes;
}

void Call::CheckShape(const std::string& role, const Dims& dims, const Axes& axes, bool has_full_vmap) const {
  bool fits = dims.size() == num_vmap_axes_ + axes.size();
  for (size_t axis = 0; fits && axis < num_vmap_axes_; ++axis) {
    fits = dims[axis] == vmap_dims_[axis] || (dims[axis] == 1 && !has_full_vmap);
  }
  for (size_t axis = 0; fits && axis < axes.size(); ++axis) {
    const int64_t dim = dims[num_vmap_axes_ + axis];
    fits = dim == axes[axis].size || (dim == 1 && axes[axis].may_be_one);
  }
  if (fits) return;
  std::string expected;
  const auto add = [&](int64_t size, bool may_be_one) {
    expected += (expected.empty() ? "" : ", ") + std::to_string(size) + (may_be_one && size != 1 ? "|1" : "");
  };
  for (const int64_t dim : vmap_dims_) add(dim, !has_full_vmap);
  for (const Axis& axis : axes) add(axis.size, axis.may_be_one);
  throw InvalidCall(role + " has shape " + ShapeText(dims) + ", expected (" + expected + ")");
}

void Call::CheckDType(const std::string& role, DType dtype, std::span<const DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return;
  std::string names;
  for (const DType type : allowed) names += (names.empty() ? "" : " or ") + std::string(NameOf(type));
  throw InvalidCall(role + " has dtype " + NameOf(dtype) + ", expected " + names);
}

OuterOffsets Call::Offsets(const Dims& dims, bool has_batch_axes) const {
  const size_t num_leading = num_vmap_axes_ + (has_batch_axes ? num_batch_axes_ : 0);
  const auto split = dims.begin() + static_cast<std::ptrdiff_t>(num_leading);
  Dims leading(dims.begin(), split);
  leading.resize(outer_dims_.size(), 1);
  return OffsetsOf(leading, outer_dims_, Product(Dims(split, dims.end())));
}

// Arrays without elements may come without an address; it is never read but must not look like an absent operand.
void* AddressOf(const Array& array) {
  static char nothing;
  return array.data == nullptr ? &nothing : array.data;
}

Operand Call::Given(const std::string& role, const Axes& axes, bool has_batch_axes,
                    std::span<const DType> allowed) const {
  const Array* array = Find(role);
  if (array == nullptr) return {};
  CheckShape(role, array->dims, axes, false);
  CheckDType(role, array->dtype, allowed);
  return {AddressOf(*array), array->dtype, Offsets(array->dims, has_batch_axes)};
}

Result Call::Asked(const std::string& role, const Axes& axes, bool has_batch_axes, DType dtype) const {
  const auto found = results_.find(role);
  if (found == results_.end()) return {};
  const Array& array = found->second;
  CheckShape("result " + role, array.dims, axes, true);
  CheckDType("result " + role, array.dtype, Only{dtype});
  return {AddressOf(array), array.dtype, Offsets(array.dims, has_batch_axes), Product(array.dims)};
}

// Of the three axes after *V, *B.
BroadcastStrides Call::InnerStrides(const Dims& dims) const {
  const size_t base = num_vmap_axes_ + num_batch_axes_;
  return {.head = dims[base] == 1 ? 0 : dims[base + 1] * dims[base + 2],
          .row = dims[base + 1] == 1 ? 0 : dims[base + 2],
          .column = dims[base + 2] == 1 ? 0 : 1};
}

AttentionProblem Call::Problem() const {
  static constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
  static constexpr DType kInt[] = {DType::kS32};
  const IsaChoice& isa = SelectIsa();
  if (isa.kernels == nullptr) throw InvalidCall(isa.error);
  AttentionProblem p;
  p.isa = isa.kernels;
  p.deterministic = Attribute<bool>(attributes_, "deterministic");
  p.full_precision = Attribute<bool>(attributes_, "full_precision");
  p.num_vmap = Product(vmap_dims_);
  p.num_batch = Product(batch_dims_);
  p.q_seq_len = CheckedInt(q_seq_len_, "the query length");
  p.kv_seq_len = CheckedInt(kv_seq_len_, "the key length");
  p.num_q_heads = CheckedInt(num_q_heads_, "the number of query heads");
  p.num_kv_heads = CheckedInt(num_kv_heads_, "the number of key heads");
  p.head_dim = static_cast<int>(head_dim_);
  p.value_head_dim = static_cast<int>(value_head_dim_);

  CheckDType("query", dtype_, kFloats);
  p.query = Given("query", WithBatch({{q_seq_len_}, {num_q_heads_}, {head_dim_}}), true, Only{dtype_});
  p.key = Given("key", WithBatch({{kv_seq_len_}, {num_kv_heads_}, {head_dim_}}), true, Only{dtype_});
  p.value = Given("value", WithBatch({{kv_seq_len_}, {num_kv_heads_}, {value_head_dim_}}), true, Only{dtype_});
  Get("scale");
  p.scale = Given("scale", {}, false, Only{DType::kF32});
  p.bias = Given("bias", WithBatch({{num_q_heads_, true}, {q_seq_len_, true}, {kv_seq_len_, true}}, true), true,
                 kFloats);
  if (p.bias) p.bias_strides = InnerStrides(Get("bias").dims);
  p.q_segment_ids = Given("q_segment_ids", WithBatch({{q_seq_len_}}), true, kInt);
  p.kv_segment_ids = Given("kv_segment_ids", WithBatch({{kv_seq_len_}}), true, kInt);
  p.q_seq_lengths = Given("q_seq_lengths", WithBatch({}), true, kInt);
  p.kv_seq_lengths = Given("kv_seq_lengths", WithBatch({}), true, kInt);
  p.q_offset = Given("q_offset", WithBatch({}), true, kInt);
  p.kv_offset = Given("kv_offset", WithBatch({}), true, kInt);
  p.sinks = Given("sinks", {{num_q_heads_}}, false, Only{DType::kF32});
  p.batch_index = Given("batch_index", WithBatch({}), true, kInt);
  p.head_index = Given("head_index", {{num_q_heads_}}, false, kInt);
  if (Find("block_mask") != nullptr) {
    p.block_q = Attribute<int64_t>(attributes_, "block_q");
    p.block_kv = Attribute<int64_t>(attributes_, "block_kv");
    if (p.block_q < 1 || p.block_kv < 1) {
      throw InvalidCall("block_mask has blocks of " + std::to_string(p.block_q) + " x " +
                        std::to_string(p.block_kv) + ", both sizes must be positive");
    }
    const int64_t q_blocks = (q_seq_len_ + p.block_q - 1) / p.block_q;
    const int64_t kv_blocks = (kv_seq_len_ + p.block_kv - 1) / p.block_kv;
    p.block_mask =
        Given("block_mask", WithBatch({{num_q_heads_, true}, {q_blocks}, {kv_blocks}}, true), true, Only{DType::kU8});
    // Only heads are broadcast: a single row or column of blocks is no broadcast axis.
    p.block_mask_strides = InnerStrides(Get("block_mask").dims);
    p.block_mask_strides.row = kv_blocks;
  }
  DecodePrograms(&p);
  return p;
}

void Call::DecodePrograms(AttentionProblem* p) const {
  for (const auto& [role, array] : operands_) p->num_captures += role.starts_with("capture.");
  p->captures.resize(static_cast<size_t>(p->num_vmap * p->num_captures));
  for (int number = 0; number < p->num_captures; ++number) {
    const std::string role = "capture." + std::to_string(number);
    const Array& array = Get(role);
    const auto split = array.dims.begin() + static_cast<std::ptrdiff_t>(num_vmap_axes_);
    Capture capture = {};
    capture.dtype = array.dtype;
    capture.rank = CheckedInt(array.dims.end() - split, "the rank of " + role, Capture::kMaxRank);
    long long size = 1;
    for (int axis = capture.rank; axis-- > 0;) {
      capture.dims[axis] = split[axis];
      capture.strides[axis] = size;
      size *= split[axis];
    }
    const OuterOffsets offsets = OffsetsOf(Dims(array.dims.begin(), split), vmap_dims_, size);
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

ForwardResults Call::Forward() const {
  const auto lse = results_.find("lse");
  if (results_.size() != 2 || lse == results_.end() || !results_.contains("out")) {
    throw InvalidCall("the results of the forward call are 'out' and 'lse'");
  }
  ForwardResults r;
  r.out = Asked("out", WithBatch({{q_seq_len_}, {num_q_heads_}, {value_head_dim_}}), true, dtype_);
  const Dims flat = {Product(outer_dims_) * num_q_heads_, q_seq_len_};
  if (lse->second.dims != flat) {
    throw InvalidCall("result lse has shape " + ShapeText(lse->second.dims) + ", expected " + ShapeText(flat));
  }
  CheckDType("result lse", lse->second.dtype, Only{DType::kF32});
  r.lse = {AddressOf(lse->second), DType::kF32, {.step = num_q_heads_ * q_seq_len_, .table = {}}, Product(flat)};
  return r;
}

BackwardOperands Call::BackwardInputs() const {
  const Axes out = WithBatch({{q_seq_len_}, {num_q_heads_}, {value_head_dim_}});
  const Axes lse = WithBatch({{num_q_heads_}, {q_seq_len_}});
  for (const char* role : {"out", "dout", "lse"}) Get(role);
  BackwardOperands b;
  b.out = Given("out", out, true, Only{dtype_});
  b.dout = Given("dout", out, true, Only{dtype_});
  b.lse = Given("lse", lse, true, Only{DType::kF32});
  b.dlse = Given("dlse", lse, true, Only{DType::kF32});
  return b;
}

BackwardResults Call::Backward(const AttentionProblem& problem) const {
  BackwardResults r;
  r.dquery = Asked("query", WithBatch({{q_seq_len_}, {num_q_heads_}, {head_dim_}}), true, dtype_);
  r.dkey = Asked("key", WithBatch({{kv_seq_len_}, {num_kv_heads_}, {head_dim_}}), true, dtype_);
  r.dvalue = Asked("value", WithBatch({{kv_seq_len_}, {num_kv_heads_}, {value_head_dim_}}), true, dtype_);
  r.dscale = Asked("scale", {}, false, DType::kF32);
  size_t num_known = size_t{bool(r.dquery)} + bool(r.dkey) + bool(r.dvalue) + bool(r.dscale);
  const auto own_axes = [&](const std::string& role) {
    Axes axes;
    const Dims& dims = Get(role).dims;
    for (size_t axis = num_vmap_axes_; axis < dims.size(); ++axis) axes.push_back({dims[axis]});
    return axes;
  };
  if (results_.contains("bias")) {
    r.dbias = Asked("bias", own_axes("bias"), true, DType::kF32);
    ++num_known;
  }
  r.dcaptures.resize(static_cast<size_t>(problem.num_captures));
  for (size_t number = 0; number < r.dcaptures.size(); ++number) {
    const std::string role = "capture." + std::to_string(number);
    if (!results_.contains(role)) continue;
    r.dcaptures[number] = Asked(role, own_axes(role), false, DType::kF32);
    ++num_known;
  }
  if (num_known != results_.size()) {
    throw InvalidCall("the backward call has a result without an operand of that role: results are '" +
                      std::string(Attribute<std::string_view>(attributes_, "results")) + "'");
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

template <class F>
ffi::Error Guarded(F function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attention: out of memory");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("attention: ") + error.what());
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "attention: unknown failure");
  }
}

ffi::Error ForwardCpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attributes) {
  return Guarded([&] {
    const Call call(args, rets, attributes);
    const AttentionProblem problem = call.Problem();
    AttentionForward(problem, call.Forward(), ExecutorOf(pool));
  });
}

ffi::Error BackwardCpu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attributes) {
  return Guarded([&] {
    const Call call(args, rets, attributes);
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
