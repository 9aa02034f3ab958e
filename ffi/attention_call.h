// What a custom call says, independent of XLA and of the backend: arrays by role, sizes, and every
// check of docs/internals.md section 3.
#ifndef FKL_FFI_ATTENTION_CALL_H_
#define FKL_FFI_ATTENTION_CALL_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/dtype.h"

namespace fkl {

using Dims = std::vector<int64_t>;

struct Array {
  void* data;
  DType dtype;
  Dims dims;
};
using Arrays = std::map<std::string, Array, std::less<>>;

int64_t Product(std::span<const int64_t> dims);

// Arrays without elements may come without an address; it is never read but must not look like an
// absent operand.
void* AddressOf(const Array& array);

// Sizes of the blocks of block_mask, 0 without one.
struct BlockSizes {
  int64_t q = 0, kv = 0;
};

// Throws InvalidCall wherever something does not fit.
class AttentionCall {
 public:
  AttentionCall(int64_t num_batch_dims, BlockSizes blocks, Arrays operands, Arrays results);

  // Checked against the role's shape and element types; null if the call has no such operand or
  // result. Results may be named as in the attribute `results`: out, lse, query, key, value, scale,
  // bias, capture.k.
  const Array* Operand(std::string_view role) const;
  const Array* Result(std::string_view role) const;
  const Array& Required(std::string_view role) const;
  const Array* Workspace() const;
  int num_captures() const { return num_captures_; }
  const Array& Capture(int number) const;

  // Roles of the forward's and the backward's results are the known ones.
  void CheckForwardResults() const;
  void CheckBackwardResults() const;

  // Number of leading axes of a role's arrays that belong to *V, *B.
  size_t NumOuterAxes(std::string_view role) const;
  // Of the three axes after *V, *B.
  std::array<int64_t, 3> InnerStrides(const Dims& dims) const;
  // Of the whole array, the axes *V and *B first: 0 where it is the same for all.
  Dims OuterStrides(std::string_view role, const Dims& dims) const;

  size_t num_vmap_axes() const { return vmap_dims_.size(); }
  const Dims& vmap_dims() const { return vmap_dims_; }
  const Dims& batch_dims() const { return batch_dims_; }
  const Dims& outer_dims() const { return outer_dims_; }  // *V, *B
  int64_t num_outer() const { return Product(outer_dims_); }
  int64_t q_seq_len() const { return q_seq_len_; }
  int64_t kv_seq_len() const { return kv_seq_len_; }
  int64_t num_q_heads() const { return num_q_heads_; }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t value_head_dim() const { return value_head_dim_; }
  DType dtype() const { return dtype_; }  // of query
  const BlockSizes& blocks() const { return blocks_; }
  int64_t num_q_blocks() const { return (q_seq_len_ + blocks_.q - 1) / blocks_.q; }
  int64_t num_kv_blocks() const { return (kv_seq_len_ + blocks_.kv - 1) / blocks_.kv; }

 private:
  struct Role;

  const Array* Find(std::string_view role) const;
  void CheckKnownRoles() const;
  void FindSizes(int64_t num_batch_dims);
  Role RoleOf(std::string_view role) const;
  // The array's shape is *V, *B, the role's own axes; of an operand's vmap axes each may be 1.
  void CheckShape(std::string_view name, const Dims& dims, const Role& role, bool is_result) const;
  void CheckLikeOperand(std::string_view role, const Dims& dims, const Dims& operand) const;
  static void CheckDType(std::string_view prefix, std::string_view role, DType dtype, std::span<const DType> allowed);

  Arrays operands_, results_;
  BlockSizes blocks_;
  int num_captures_ = 0;
  Dims vmap_dims_, batch_dims_, outer_dims_;
  int64_t q_seq_len_ = 0, kv_seq_len_ = 0;
  int64_t num_q_heads_ = 0, num_kv_heads_ = 0, head_dim_ = 0, value_head_dim_ = 0;
  DType dtype_ = DType::kF32;
};

}  // namespace fkl

#endif  // FKL_FFI_ATTENTION_CALL_H_
