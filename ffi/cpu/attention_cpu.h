// Attention on the CPU: what a call is, in plain structs, and its two entry points.
#ifndef FKL_FFI_CPU_ATTENTION_CPU_H_
#define FKL_FFI_CPU_ATTENTION_CPU_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/program.h"

namespace fkl {

// The parts of an array that belong to the elements of *V x *B ("outer" elements, numbered
// row-major), broadcast or not.
struct OuterOffsets {
  int64_t step = 0;            // offset = outer * step, unless there is a table
  std::vector<int64_t> table;  // offset by outer element
  int64_t At(int64_t outer) const { return table.empty() ? outer * step : table[static_cast<size_t>(outer)]; }
};

struct Operand {
  const void* data = nullptr;  // null: not given
  DType dtype = DType::kF32;
  OuterOffsets offsets;  // in elements

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  const T* At(int64_t outer) const {
    return static_cast<const T*>(data) + offsets.At(outer);
  }
  // Element `index` of an outer element, whatever its type.
  const void* Address(int64_t outer, int64_t index) const {
    return static_cast<const char*>(data) + (offsets.At(outer) + index) * SizeOf(dtype);
  }
};

struct Result {
  void* data = nullptr;  // null: not asked for
  DType dtype = DType::kF32;
  OuterOffsets offsets;
  int64_t size = 0;  // elements of the whole array

  explicit operator bool() const { return data != nullptr; }
  void* Address(int64_t outer, int64_t index) const {
    return static_cast<char*>(data) + (offsets.At(outer) + index) * SizeOf(dtype);
  }
};

// Strides of an array that may be broadcast over heads, queries and keys (bias), or over heads
// (block mask).
struct BroadcastStrides {
  int64_t head = 0, row = 0, column = 0;
};

struct AttentionProblem {
  const IsaKernels* isa = nullptr;
  bool deterministic = false;
  bool full_precision = false;

  int64_t num_vmap = 1;   // product of *V
  int64_t num_batch = 1;  // product of *B
  int64_t q_seq_len = 0, kv_seq_len = 0;
  int num_q_heads = 0, num_kv_heads = 0, head_dim = 0, value_head_dim = 0;

  Operand query, key, value, scale;
  Operand bias;
  BroadcastStrides bias_strides;
  Operand q_segment_ids, kv_segment_ids, q_seq_lengths, kv_seq_lengths, q_offset, kv_offset;
  Operand sinks;
  Operand block_mask;
  BroadcastStrides block_mask_strides;
  int64_t block_q = 0, block_kv = 0;
  Operand batch_index, head_index;

  Program score, mask;
  int num_captures = 0;
  std::vector<Capture> captures;  // [num_vmap][num_captures]

  int64_t num_outer() const { return num_vmap * num_batch; }
  int group_size() const { return num_q_heads / num_kv_heads; }
  int64_t VmapOf(int64_t outer) const { return outer / num_batch; }
  const Capture* CapturesOf(int64_t outer) const { return captures.data() + VmapOf(outer) * num_captures; }
  float ScaleOf(int64_t outer) const { return *scale.At<float>(outer); }
  // The indices that programs see.
  int32_t GlobalBatch(int64_t outer) const { return batch_index ? *batch_index.At<int32_t>(outer) : 0; }
  int32_t GlobalHead(int64_t outer, int head) const { return head_index ? head_index.At<int32_t>(outer)[head] : 0; }
  int64_t GlobalQuery(int64_t outer, int64_t q) const { return q + (q_offset ? *q_offset.At<int32_t>(outer) : 0); }
  int64_t GlobalKey(int64_t outer, int64_t kv) const { return kv + (kv_offset ? *kv_offset.At<int32_t>(outer) : 0); }
  // Rows and keys from these on are dead.
  int64_t QueryLength(int64_t outer) const { return Length(q_seq_lengths, outer, q_seq_len); }
  int64_t KeyLength(int64_t outer) const { return Length(kv_seq_lengths, outer, kv_seq_len); }

 private:
  static int64_t Length(const Operand& lengths, int64_t outer, int64_t size) {
    if (!lengths) return size;
    return std::clamp<int64_t>(*lengths.At<int32_t>(outer), 0, size);
  }
};

struct ForwardResults {
  Result out;
  Result lse;
};

struct BackwardOperands {
  Operand out, dout, lse, dlse;  // dlse may be absent
};

struct BackwardResults {
  Result dquery, dkey, dvalue;
  Result dscale;  // [num_vmap]
  Result dbias;
  std::vector<Result> dcaptures;  // by capture; [num_vmap] x its size
};

// Each writes every element of its results. They throw std::bad_alloc.
void AttentionForward(const AttentionProblem& problem, const ForwardResults& results, const Executor& executor);
void AttentionBackward(const AttentionProblem& problem, const BackwardOperands& operands,
                       const BackwardResults& results, const Executor& executor);

// Tiles classified since the process started, for tests: they show that dead tiles are not
// computed.
struct TileCounts {
  std::atomic<int64_t> full{0}, mixed{0}, dead{0};
};
TileCounts& GlobalTileCounts();

}  // namespace fkl

#endif  // FKL_FFI_CPU_ATTENTION_CPU_H_
