// Checks everything: a damaged or foreign module must get an error, never a crash.
#include "attention_call.h"

#include <algorithm>
#include <utility>

#include "ffi_checks.h"

namespace fkl {
namespace {

constexpr int64_t kMaxHeadDim = 1024;
constexpr std::string_view kCapture = "capture.";

// Lists of element types.
constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr DType kFloat32[] = {DType::kF32};
constexpr DType kInt32[] = {DType::kS32};
constexpr DType kUInt8[] = {DType::kU8};

}  // namespace

int64_t Product(std::span<const int64_t> dims) {
  int64_t product = 1;
  for (const int64_t dim : dims) product *= dim;
  return product;
}

void* AddressOf(const Array& array) {
  static char nothing;
  return array.data == nullptr ? &nothing : array.data;
}

// What internals.md says about a role. Filled for every array of every call, so it must not allocate.
struct AttentionCall::Role {
  std::array<int64_t, 3> sizes = {};  // of the axes after *V, *B
  size_t num_axes = 0;
  std::span<const DType> dtypes;
  bool has_batch_axes = true;
  int num_broadcast_axes = 0;  // so many of its own axes may be 1; then those of *B too
};

AttentionCall::AttentionCall(int64_t num_batch_dims, BlockSizes blocks, Arrays operands, Arrays results)
    : operands_(std::move(operands)), results_(std::move(results)), blocks_(blocks) {
  CheckKnownRoles();
  FindSizes(num_batch_dims);
}

const Array* AttentionCall::Find(std::string_view role) const {
  const auto found = operands_.find(role);
  return found == operands_.end() ? nullptr : &found->second;
}

const Array& AttentionCall::Required(std::string_view role) const {
  if (const Array* array = Operand(role)) return *array;
  throw InvalidCall("operand '" + std::string(role) + "' is missing");
}

// An operand that nobody reads would be an argument silently ignored.
void AttentionCall::CheckKnownRoles() const {
  static constexpr std::string_view kOperands[] = {"query",
                                                   "key",
                                                   "value",
                                                   "scale",
                                                   "bias",
                                                   "q_segment_ids",
                                                   "kv_segment_ids",
                                                   "q_seq_lengths",
                                                   "kv_seq_lengths",
                                                   "q_offset",
                                                   "kv_offset",
                                                   "sinks",
                                                   "block_mask",
                                                   "batch_index",
                                                   "head_index",
                                                   "out",
                                                   "lse",
                                                   "dout",
                                                   "dlse"};
  for (const auto& [role, array] : operands_) {
    if (role.starts_with(kCapture)) continue;
    if (std::find(std::begin(kOperands), std::end(kOperands), role) == std::end(kOperands)) {
      throw InvalidCall("operand role '" + role + "' is unknown");
    }
  }
  if ((Find("q_segment_ids") == nullptr) != (Find("kv_segment_ids") == nullptr)) {
    throw InvalidCall("q_segment_ids and kv_segment_ids must be given together");
  }
}

void AttentionCall::FindSizes(int64_t num_batch_dims) {
  const auto get = [&](std::string_view role) -> const Array& {
    if (const Array* array = Find(role)) return *array;
    throw InvalidCall("operand '" + std::string(role) + "' is missing");
  };
  const Array& query = get("query");
  const Array& key = get("key");
  const Array& value = get("value");
  const auto rank = static_cast<int64_t>(query.dims.size());
  if (num_batch_dims < 0 || rank < num_batch_dims + 3) {
    throw InvalidCall("query has shape " + ShapeText(query.dims) +
                      "; with num_batch_dims=" + std::to_string(num_batch_dims) + " it needs (*batch, T, N, H)");
  }
  CheckSame("the rank of key", static_cast<int64_t>(key.dims.size()), "the rank of query", rank);
  CheckSame("the rank of value", static_cast<int64_t>(value.dims.size()), "the rank of query", rank);
  const auto num_vmap_axes = static_cast<size_t>(rank - num_batch_dims - 3);
  vmap_dims_.assign(num_vmap_axes, 1);
  for (const auto& [role, array] : operands_) {
    num_captures_ += role.starts_with(kCapture);
    if (array.dims.size() < num_vmap_axes) {
      throw InvalidCall(role + " has shape " + ShapeText(array.dims) + "; like query it must start with " +
                        std::to_string(num_vmap_axes) + " vmap axes");
    }
    for (size_t axis = 0; axis < num_vmap_axes; ++axis) {
      if (array.dims[axis] == 1) continue;
      if (vmap_dims_[axis] != 1 && vmap_dims_[axis] != array.dims[axis]) {
        CheckSame("vmap axis " + std::to_string(axis) + " of " + role, array.dims[axis], "that of another operand",
                  vmap_dims_[axis]);
      }
      vmap_dims_[axis] = array.dims[axis];
    }
  }
  const size_t base = num_vmap_axes + static_cast<size_t>(num_batch_dims);
  for (size_t axis = num_vmap_axes; axis < base; ++axis) batch_dims_.push_back(query.dims[axis]);
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
  for (const auto& [what, size] :
       {std::pair<const char*, int64_t>("head_dim", head_dim_), {"value_head_dim", value_head_dim_}}) {
    if (size < 1 || size > kMaxHeadDim) {
      throw InvalidCall(std::string(what) + " is " + std::to_string(size) + ", the kernels take 1 to " +
                        std::to_string(kMaxHeadDim));
    }
  }
  if (num_q_heads_ > 0 && (num_kv_heads_ == 0 || num_q_heads_ % num_kv_heads_ != 0)) {
    throw InvalidCall("query has " + std::to_string(num_q_heads_) + " heads, key and value have " +
                      std::to_string(num_kv_heads_) + "; the first must be a multiple of the second");
  }
  if (Find("block_mask") != nullptr && (blocks_.q < 1 || blocks_.kv < 1)) {
    throw InvalidCall("block_mask has blocks of " + std::to_string(blocks_.q) + " x " + std::to_string(blocks_.kv) +
                      ", both sizes must be positive");
  }
}

AttentionCall::Role AttentionCall::RoleOf(std::string_view role) const {
  const int64_t t = q_seq_len_, s = kv_seq_len_, n = num_q_heads_, k = num_kv_heads_;
  const std::span<const DType> same(&dtype_, 1);
  if (role == "query") return {{t, n, head_dim_}, 3, kFloats};
  if (role == "key") return {{s, k, head_dim_}, 3, same};
  if (role == "value") return {{s, k, value_head_dim_}, 3, same};
  if (role == "out" || role == "dout") return {{t, n, value_head_dim_}, 3, same};
  if (role == "lse" || role == "dlse") return {{n, t}, 2, kFloat32};
  if (role == "scale") return {{}, 0, kFloat32, false};
  if (role == "bias") return {{n, t, s}, 3, kFloats, true, 3};
  if (role == "q_segment_ids") return {{t}, 1, kInt32};
  if (role == "kv_segment_ids") return {{s}, 1, kInt32};
  if (role == "sinks") return {{n}, 1, kFloat32, false};
  if (role == "head_index") return {{n}, 1, kInt32, false};
  if (role == "block_mask") return {{n, num_q_blocks(), num_kv_blocks()}, 3, kUInt8, true, 1};
  return {{}, 0, kInt32};  // lengths, offsets, batch_index
}

void AttentionCall::CheckShape(std::string_view name, const Dims& dims, const Role& role, bool is_result) const {
  const size_t num_vmap = vmap_dims_.size(), num_batch = role.has_batch_axes ? batch_dims_.size() : 0;
  const auto expected = [&](size_t axis) -> std::pair<int64_t, bool> {  // size, and whether 1 will do
    if (axis < num_vmap) return {vmap_dims_[axis], !is_result};
    axis -= num_vmap;
    if (axis < num_batch) return {batch_dims_[axis], role.num_broadcast_axes > 0};
    axis -= num_batch;
    return {role.sizes[axis], static_cast<int>(axis) < role.num_broadcast_axes};
  };
  const size_t rank = num_vmap + num_batch + role.num_axes;
  bool fits = dims.size() == rank;
  for (size_t axis = 0; fits && axis < rank; ++axis) {
    const auto [size, may_be_one] = expected(axis);
    fits = dims[axis] == size || (dims[axis] == 1 && may_be_one);
  }
  if (fits) return;
  std::string text;
  for (size_t axis = 0; axis < rank; ++axis) {
    const auto [size, may_be_one] = expected(axis);
    text += (axis == 0 ? "" : ", ") + std::to_string(size) + (may_be_one && size != 1 ? "|1" : "");
  }
  throw InvalidCall((is_result ? "result " : "") + std::string(name) + " has shape " + ShapeText(dims) +
                    ", expected (" + text + ")");
}

void AttentionCall::CheckDType(std::string_view prefix, std::string_view role, DType dtype,
                               std::span<const DType> allowed) {
  if (std::find(allowed.begin(), allowed.end(), dtype) != allowed.end()) return;
  std::string names;
  for (const DType type : allowed) names += (names.empty() ? "" : " or ") + std::string(NameOf(type));
  throw InvalidCall(std::string(prefix) + std::string(role) + " has dtype " + NameOf(dtype) + ", expected " + names);
}

const Array* AttentionCall::Operand(std::string_view role) const {
  const Array* array = Find(role);
  if (array == nullptr) return nullptr;
  const Role expected = RoleOf(role);
  CheckShape(role, array->dims, expected, false);
  CheckDType("", role, array->dtype, expected.dtypes);
  return array;
}

const Array& AttentionCall::Capture(int number) const {
  const std::string role = std::string(kCapture) + std::to_string(number);
  if (const Array* array = Find(role)) return *array;
  throw InvalidCall("operand '" + role + "' is missing");
}

const Array* AttentionCall::Result(std::string_view role) const {
  const auto found = results_.find(role);
  if (found == results_.end()) return nullptr;
  const Array& array = found->second;
  if (role == "bias" || role.starts_with(kCapture)) {
    const Array* operand = Find(role);
    if (operand == nullptr) throw InvalidCall("result " + std::string(role) + " has no operand of that role");
    CheckLikeOperand(role, array.dims, operand->dims);
    CheckDType("result ", role, array.dtype, kFloat32);
    return &array;
  }
  Role expected = RoleOf(role);
  if (role == "lse") {
    const Dims flat = {num_outer() * num_q_heads_, q_seq_len_};
    if (array.dims != flat) {
      throw InvalidCall("result lse has shape " + ShapeText(array.dims) + ", expected " + ShapeText(flat));
    }
  } else {
    CheckShape(role, array.dims, expected, true);
  }
  if (role == "query") expected.dtypes = {&dtype_, 1};
  CheckDType("result ", role, array.dtype, expected.dtypes);
  return &array;
}

// A gradient has the operand's own axes, broadcast ones too, and all of *V.
void AttentionCall::CheckLikeOperand(std::string_view role, const Dims& dims, const Dims& operand) const {
  bool fits = dims.size() == operand.size();
  for (size_t axis = 0; fits && axis < dims.size(); ++axis) {
    fits = dims[axis] == (axis < vmap_dims_.size() ? vmap_dims_[axis] : operand[axis]);
  }
  if (fits) return;
  Dims expected = operand;
  std::copy(vmap_dims_.begin(), vmap_dims_.end(), expected.begin());
  throw InvalidCall("result " + std::string(role) + " has shape " + ShapeText(dims) + ", expected " +
                    ShapeText(expected));
}

// Bytes, as many as the launch record asks for.
const Array* AttentionCall::Workspace() const {
  const auto found = results_.find("workspace");
  if (found == results_.end()) return nullptr;
  CheckDType("result ", "workspace", found->second.dtype, kUInt8);
  return &found->second;
}

void AttentionCall::CheckForwardResults() const {
  const size_t num_known = 2 + results_.contains("workspace");
  if (results_.size() != num_known || !results_.contains("out") || !results_.contains("lse")) {
    throw InvalidCall("the results of the forward call are 'out' and 'lse'");
  }
}

void AttentionCall::CheckBackwardResults() const {
  static constexpr std::string_view kResults[] = {"query", "key", "value", "scale", "bias", "workspace"};
  std::string roles;
  bool all_known = true;
  for (const auto& [role, array] : results_) {
    roles += (roles.empty() ? "" : " ") + role;
    const bool is_known = std::find(std::begin(kResults), std::end(kResults), role) != std::end(kResults);
    all_known = all_known && (role == "workspace" || ((is_known || role.starts_with(kCapture)) && Find(role)));
  }
  if (!all_known) {
    throw InvalidCall("the backward call has a result without an operand of that role: results are '" + roles + "'");
  }
}

size_t AttentionCall::NumOuterAxes(std::string_view role) const {
  const bool has_batch_axes = !role.starts_with(kCapture) && RoleOf(role).has_batch_axes;
  return vmap_dims_.size() + (has_batch_axes ? batch_dims_.size() : 0);
}

std::array<int64_t, 3> AttentionCall::InnerStrides(const Dims& dims) const {
  const size_t base = outer_dims_.size();
  return {dims[base] == 1 ? 0 : dims[base + 1] * dims[base + 2], dims[base + 1] == 1 ? 0 : dims[base + 2],
          dims[base + 2] == 1 ? 0 : 1};
}

Dims AttentionCall::OuterStrides(std::string_view role, const Dims& dims) const {
  const size_t num_own = NumOuterAxes(role);
  Dims strides(outer_dims_.size(), 0);
  int64_t stride = Product(std::span(dims).subspan(num_own));
  for (size_t axis = num_own; axis-- > 0;) {
    strides[axis] = dims[axis] == 1 ? 0 : stride;
    stride *= dims[axis];
  }
  return strides;
}

}  // namespace fkl
