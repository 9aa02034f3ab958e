// The table of kernels that one instruction set exports. Plain data only (see program_ops.h).
//
// isa_portable.cc, isa_avx2.cc, isa_avx512.cc and isa_avx512_bf16.cc each fill one table from the
// same sources (isa_kernels.inc, row_ops.inc); SelectIsa() picks once per process what the CPU has.
//
// Shapes of the working copies: a tile has up to 256 key columns; K^T is kept in panels of
// panel_width columns, [panel][head_dim][panel_width]; every other copy is row-major with rows
// padded to the vector width.
#ifndef FKL_FFI_CPU_ISA_H_
#define FKL_FFI_CPU_ISA_H_

#include "cpu/row_ops.h"

namespace fkl {

// One matrix product over register blocks of strip_rows x panel_width:
//   C[r][c] = (mode) sum over k of A(r, k) * B[k][c].
enum GemmMode : int {
  kGemmOverwrite,
  kGemmAdd,
  kGemmScaleAdd,  // C = row_scale[r] * C + sum: the online softmax rescales on the way through the
                  // accumulators
  kNumGemmModes
};

struct GemmArgs {
  const void* a;
  long long a_stride;  // gemm_rows: between rows r (k adjacent); gemm_columns: between k (rows adjacent)
  const void* b;
  long long b_stride;        // between k
  long long b_panel_stride;  // between panels of columns
  float* c;
  long long c_stride;
  const float* row_scale;
  int num_rows;
  int num_vectors;  // columns / vector_width
  int depth;        // number of k
};

// What is live in one row of a mixed tile.
struct TileRow {
  int begin,
      end;                   // all live columns are in [begin, end); begin is a multiple of 16; equal: none is live
  int zero_begin, zero_end;  // columns of P that must hold 0 where they are not live
  unsigned bits[kRowWidth / 32];
};

// Online softmax: turns rows of scores into exp(score_scale * score - row_max) and updates the
// running state.
struct SoftmaxArgs {
  const float* scores;
  long long score_stride;
  void* probs;  // float, or bf16 in softmax_rows_bf16
  long long prob_stride;
  int num_rows;
  int num_lanes;        // a multiple of the vector width when `rows` is null
  float score_scale;    // >= 0
  const TileRow* rows;  // null: every lane is live
  float* row_max;       // of score_scale * score
  float* row_sum;
  float* row_scale;  // out: what the sums so far must be multiplied with
};

// P = exp(score - lse) and dS = P * (dP - delta), exactly 0 where dead.
struct BackwardRowsArgs {
  const float* scores;
  float* probs;
  float* dprobs;  // in: dP, out: dS; may be null
  long long stride;
  int num_rows;
  int num_lanes;
  const TileRow* rows;  // null: every lane is live
  const float* neg_lse;
  const float* delta;
};

struct PackArgs {
  const void* src;
  DType dtype;
  long long src_stride;  // elements between rows
  int num_rows;          // rows read; rows up to padded_rows become 0
  int padded_rows;
  int num_columns;
  float scale;  // pack_rows only
  void* out;
  long long out_stride;  // pack_rows: elements between rows, >= num_columns rounded up to the
                         // vector width
};

// Scores of few query rows against keys read in place. Rows are those of one key/value head after
// the other.
struct DotArgs {
  const float* query;
  long long query_stride;
  int num_heads;  // key/value heads, adjacent in memory
  int num_rows;   // of each head, 1..kMaxDotRows
  const void* keys;
  DType dtype;
  long long key_stride;
  int num_keys;
  int head_dim;
  float* scores;
  long long score_stride;
};
constexpr int kMaxDotRows = 4;

// acc[r] = row_scale[r] * acc[r] + sum over keys of probs[r][key] * values[key], values read in
// place.
struct WeightedSumArgs {
  const float* probs;
  long long prob_stride;
  int num_heads;  // key/value heads, adjacent in memory
  int num_rows;   // of each head, 1..kMaxDotRows
  const void* values;
  DType dtype;
  long long value_stride;
  int num_keys;
  int value_head_dim;
  float* acc;
  long long acc_stride;
  const float* row_scale;
  bool skips_zero;  // leave out products with a probability of 0, so that 0 * NaN cannot arise
};

struct IsaKernels {
  const char* name;
  int vector_width;  // floats per vector register

  // Runs instructions [begin, end) of a program over one row.
  void (*run_row)(const RowInstruction* begin, const RowInstruction* end, const RowContext& context);
  // bits[c / 32] bit c % 32 = (row[c] != 0) for c < num_lanes; the rest of the kRowWidth / 32 words
  // become 0.
  void (*row_to_bits)(const int* row, int num_lanes, unsigned* bits);
  // row[c] = bit c of bits ? row[c] : 0, for c < num_lanes (a select: NaN in a dead lane becomes
  // 0).
  void (*select_row)(float* row, const unsigned* bits, int num_lanes);

  int panel_width;  // columns of a register block
  int strip_rows;   // rows of a register block
  void (*gemm_rows[kNumGemmModes])(const GemmArgs& args);
  void (*gemm_columns)(const GemmArgs& args);  // always adds

  void (*softmax_rows)(const SoftmaxArgs& args);
  void (*backward_rows)(const BackwardRowsArgs& args);

  // Both return true if a value that was read is NaN or infinite.
  bool (*pack_rows)(const PackArgs& args);
  bool (*pack_panels)(const PackArgs& args);  // transposed into panels
  // dst[c] = scale * src[c], rounded to nearest even.
  void (*store_row)(void* dst, DType dtype, const float* src, float scale, int num_columns);
  // scores[c] = scale * scores[c] + bias[c * bias_stride], bias_stride 0 or 1.
  void (*add_bias)(float* scores, float scale, const void* bias, DType dtype, int bias_stride, int num_lanes);
  // dst[c] += src[c].
  void (*add_row)(float* dst, const float* src, int num_lanes);
  // The sum of a[c] * b[c]; both padded with zeros to the vector width.
  float (*dot)(const float* a, const float* b, int num_columns);
  // Clears bit c of bits where values[c] != value, for c < num_lanes.
  void (*and_equal_bits)(const int* values, int value, int num_lanes, unsigned* bits);

  void (*dot_scores)(const DotArgs& args);
  void (*weighted_sum)(const WeightedSumArgs& args);

  // Products of bf16 pairs accumulated in float32; null unless the CPU has AVX512_BF16. A pair is
  // two elements adjacent along k in one 32-bit word; strides and depth count pairs.
  void (*gemm_bf16[kNumGemmModes])(const GemmArgs& args);
  void (*softmax_rows_bf16)(const SoftmaxArgs& args);
  bool (*pack_panels_bf16)(const PackArgs& args);     // K^T, pairs along head_dim
  bool (*pack_row_pairs_bf16)(const PackArgs& args);  // V, pairs of adjacent rows
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_ISA_H_
