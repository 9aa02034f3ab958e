// What a launch passes to a kernel: pointers, strides and sizes. Plain data, read by device code and by the host.
//
// "Outer" elements are those of *V x *B (vmap and batch axes, docs/internals.md section 3), numbered row-major. The host
// merges neighbouring axes that every operand treats alike, so that nearly always one axis is left; an operand that
// is the same along an axis has stride 0 there.
#ifndef FKL_DEVICE_ATTENTION_PARAMS_CUH_
#define FKL_DEVICE_ATTENTION_PARAMS_CUH_

namespace fkl {

constexpr int kMaxOuterAxes = 4;
constexpr int kMaxCaptures = 12;
constexpr int kMaxSplits = 128;
constexpr int kMaxTensorMaps = 8;

// An array per outer element; strides in elements.
struct VectorParam {
  void* data;  // null: not given
  long long outer_stride[kMaxOuterAxes];
};

// An array with heads and rows per outer element; the last axis is contiguous (bias: `column_stride`).
struct TensorParam {
  void* data;
  long long outer_stride[kMaxOuterAxes];
  long long head_stride;
  long long row_stride;
};

// How TMA finds its way in an array: made by the driver, read by its instructions only.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// The maps that the glue's Launch asked for, in its order. Axes: column, head, row, outer element of the array; what
// lies outside is read as zero and not written.
struct TensorMaps {
  TensorMap map[kMaxTensorMaps];
  int outer_stride[kMaxTensorMaps][kMaxOuterAxes];  // from the call's outer axes to the last coordinate
};

struct CommonParams {
  int num_outer_axes;
  int outer_size[kMaxOuterAxes];
  long long num_outer;  // their product
  int q_seq_len, kv_seq_len;
  int num_q_heads, num_kv_heads;  // query head h reads kv head h / (num_q_heads / num_kv_heads)
  int head_dim, value_head_dim;   // real sizes; tiles are padded at compile time

  TensorParam query, key, value;  // (outer, row, head, column) in memory
  VectorParam scale;              // float
  TensorParam bias;               // strides 0 along broadcast axes
  long long bias_column_stride;   // 0 or 1
  VectorParam q_segment_ids, kv_segment_ids;  // int, one per row
  VectorParam q_seq_lengths, kv_seq_lengths;  // int
  VectorParam q_offset, kv_offset;            // int
  VectorParam sinks;                          // float, one per query head (strides along *V only)
  TensorParam block_mask;                     // uint8, row = query block, contiguous kv blocks
  int block_q, block_kv, num_q_blocks, num_kv_blocks;
  VectorParam batch_index;  // int: global b
  VectorParam head_index;   // int, one per query head: global h
  VectorParam captures[kMaxCaptures];
};

struct ForwardParams {
  CommonParams common;
  TensorParam out;
  float* lse;  // flat [num_outer * num_q_heads, q_seq_len], natural logarithm, -inf on empty rows
  // Split-KV only: partial results of split s at [s][outer * head][row], out partials in float, lse natural.
  int num_splits;
  float* partial_out;  // [num_splits][num_outer * num_q_heads][q_seq_len][value_head_dim]
  float* partial_lse;  // [num_splits][num_outer * num_q_heads][q_seq_len]
  void* scratch;       // what the glue's Launch asked for, zeroed before the first kernel; null if nothing
  TensorMaps maps;     // unset without a request, and of arrays without elements
};

struct BackwardParams {
  CommonParams common;
  TensorParam out, dout;
  VectorParam lse, dlse;           // float [num_q_heads][q_seq_len] per outer element
  TensorParam dquery, dkey, dvalue;  // null data: not asked for
  float* dquery_accumulator;  // [num_outer * num_q_heads][padded rows][padded head_dim], float, or null
  float* delta;               // [num_outer * num_q_heads][padded rows]: rowsum(dout * out) - dlse, 0 in dead rows
  float* lse_log2;            // same shape: lse * log2(e), +inf in dead rows so that P is 0 there
  int padded_q_rows;
  float* dscale;              // one per outer element to be summed by the last kernel, or null
  VectorParam dscale_result;  // float, strides along *V only
  TensorParam dbias;          // float, as bias; null data: not asked for
  long long dbias_column_stride;
  VectorParam dcaptures[kMaxCaptures];  // float; null data: not asked for
  void* scratch;                        // as in ForwardParams
  TensorMaps maps;                      // likewise
};

// The host says how large it takes the structs to be, so that headers of another version cannot misread its arguments.
#ifdef FKL_FORWARD_PARAMS_BYTES
static_assert(sizeof(ForwardParams) == FKL_FORWARD_PARAMS_BYTES && sizeof(BackwardParams) == FKL_BACKWARD_PARAMS_BYTES,
              "the device headers and the extension module are of different versions; reinstall fkl_jax");
#endif

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_PARAMS_CUH_
