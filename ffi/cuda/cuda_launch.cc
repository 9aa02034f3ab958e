#include "cuda/cuda_launch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "ffi_checks.h"

namespace fkl::cuda {
namespace {

constexpr int32_t kFormatVersion = 2;
constexpr int kHeaderNumbers = 6, kKernelNumbers = 7, kMapNumbers = 3;
constexpr int64_t kPartBytes = 256;
constexpr uintptr_t kRowAlignment = 16;
constexpr size_t kMaxOuter = static_cast<size_t>(kMaxOuterAxes);

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDiv(a, multiple) * multiple; }

[[noreturn]] void ThrowDamaged(const std::string& what) { throw InvalidCall("cuda_launch is damaged: " + what); }

void CheckRange(std::string_view what, int64_t value, int64_t smallest, int64_t largest) {
  if (value >= smallest && value <= largest) return;
  ThrowDamaged(std::string(what) + " is " + std::to_string(value) + ", allowed are " + std::to_string(smallest) +
               " to " + std::to_string(largest));
}

int64_t BytesOf(const Array& array) { return Product(array.dims) * SizeOf(array.dtype); }

}  // namespace

bool IsRowAligned(const void* first, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(first) % kRowAlignment == 0 &&
         static_cast<uintptr_t>(row_bytes) % kRowAlignment == 0;
}

namespace {

// Takes numbers from the front.
class Reader {
 public:
  explicit Reader(std::span<const int32_t> numbers) : numbers_(numbers), rest_(numbers) {}

  std::span<const int32_t> Take(int64_t count) {
    if (static_cast<int64_t>(rest_.size()) < count) {
      ThrowDamaged("it has " + std::to_string(numbers_.size()) + " numbers, what it describes needs more");
    }
    const auto taken = rest_.first(static_cast<size_t>(count));
    rest_ = rest_.subspan(static_cast<size_t>(count));
    return taken;
  }
  void CheckEnd() const {
    if (rest_.empty()) return;
    ThrowDamaged("it has " + std::to_string(numbers_.size()) + " numbers, what it describes needs " +
                 std::to_string(numbers_.size() - rest_.size()));
  }

 private:
  std::span<const int32_t> numbers_, rest_;
};

LaunchRecord DecodeClass(Reader* reader) {
  constexpr int kMaxInt = std::numeric_limits<int>::max();
  const auto header = reader->Take(kHeaderNumbers);
  CheckRange("the number of kernels", header[0], 1, 64);
  LaunchRecord record;
  record.num_splits = header[1];
  record.q_tile = header[2];
  record.accumulator_head_dim = header[3];
  CheckRange("num_splits", record.num_splits, 1, kMaxSplits);
  CheckRange("q_tile", record.q_tile, 1, 1 << 16);
  CheckRange("accumulator_head_dim", record.accumulator_head_dim, 0, 1 << 16);
  CheckRange("scratch", header[4], 0, kMaxInt);
  CheckRange("the number of tensor maps", header[5], 0, kMaxTensorMaps);
  record.scratch_bytes = header[4] * kPartBytes;
  for (int k = 0; k < header[0]; ++k) {
    const auto n = reader->Take(kKernelNumbers);
    CheckRange("threads", n[0], 1, 1024);
    CheckRange("shared bytes", n[1], 0, 1 << 20);
    CheckRange("rows", n[2], 0, 3);
    CheckRange("tile", n[3], 1, kMaxInt);
    CheckRange("heads", n[4], 0, 2);
    CheckRange("repeat", n[5], 0, 3);
    CheckRange("max_blocks", n[6], 0, kMaxInt);
    record.kernels.push_back({.threads = n[0],
                              .shared_bytes = n[1],
                              .rows = n[2],
                              .tile = n[3],
                              .heads = n[4],
                              .is_per_outer = (n[5] & 1) != 0,
                              .is_per_split = (n[5] & 2) != 0,
                              .max_blocks = n[6]});
  }
  for (int m = 0; m < header[5]; ++m) {
    const auto n = reader->Take(kMapNumbers);
    CheckRange("the array of a tensor map", n[0], 0, static_cast<int>(MapArray::kDvalue));
    CheckRange("the rows of a box", n[1], 1, 256);
    CheckRange("the columns of a box", n[2], 1, 256);
    record.maps.push_back({.array = static_cast<MapArray>(n[0]), .rows = n[1], .columns = n[2]});
  }
  return record;
}

}  // namespace

LaunchRecords DecodeLaunch(std::span<const int32_t> numbers) {
  Reader reader(numbers);
  const auto first = reader.Take(2);
  if (first[0] != kFormatVersion) {
    throw InvalidCall("cuda_launch has format " + std::to_string(first[0]) + ", this library reads format " +
                      std::to_string(kFormatVersion) + "; trace or export it again with this version of fkl_jax");
  }
  CheckRange("the number of classes", first[1], 1, 2);
  LaunchRecords records;
  for (int c = 0; c < first[1]; ++c) records.classes.push_back(DecodeClass(&reader));
  reader.CheckEnd();
  return records;
}

// ---- OuterBinder

void OuterBinder::Add(void** data, long long* outer_stride, const Array& array, Dims strides) {
  // An array without elements has no element to point at, but is not absent.
  *data = AddressOf(array);
  bound_.push_back({data, static_cast<char*>(*data), outer_stride, SizeOf(array.dtype), std::move(strides)});
}

void OuterBinder::AddFlat(void** data, void* first, int64_t bytes_per_outer) {
  *data = first;
  flat_.push_back({data, static_cast<char*>(first), bytes_per_outer});
}

void OuterBinder::Finish(CommonParams* common) {
  // Neighbouring axes are one axis if every array steps through them as through one.
  std::vector<size_t> last_of_merged;  // the innermost of the original axes
  Dims sizes;
  for (size_t axis = 0; axis < outer_dims_.size(); ++axis) {
    const int64_t size = outer_dims_[axis];
    if (size == 1) continue;
    bool is_merged = !sizes.empty() && sizes.back() * size <= std::numeric_limits<int>::max();
    for (size_t i = 0; is_merged && i < bound_.size(); ++i) {
      is_merged = bound_[i].strides[last_of_merged.back()] == size * bound_[i].strides[axis];
    }
    if (is_merged) {
      sizes.back() *= size;
      last_of_merged.back() = axis;
    } else {
      sizes.push_back(size);
      last_of_merged.push_back(axis);
    }
  }
  const size_t num_round_axes = sizes.size() > kMaxOuter ? sizes.size() - kMaxOuter : 0;
  round_dims_.assign(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(num_round_axes));
  num_rounds_ = Product(round_dims_);
  common->num_outer_axes = static_cast<int>(sizes.size() - num_round_axes);
  num_outer_ = 1;
  for (size_t axis = num_round_axes; axis < sizes.size(); ++axis) {
    common->outer_size[axis - num_round_axes] = CheckedInt(sizes[axis], "a batch or vmap axis", int64_t{1} << 31);
    num_outer_ *= sizes[axis];
  }
  common->num_outer = num_outer_;
  for (Bound& bound : bound_) {
    for (size_t axis = 0; axis < kMaxOuter; ++axis) {
      const size_t from = num_round_axes + axis;
      bound.outer_stride[axis] = from < last_of_merged.size() ? bound.strides[last_of_merged[from]] : 0;
    }
    for (size_t axis = 0; axis < num_round_axes; ++axis) bound.strides[axis] = bound.strides[last_of_merged[axis]];
  }
}

void OuterBinder::SetRound(int64_t round) {
  for (Bound& bound : bound_) {
    int64_t offset = 0, rest = round;
    for (size_t axis = round_dims_.size(); axis-- > 0; rest /= round_dims_[axis]) {
      offset += rest % round_dims_[axis] * bound.strides[axis];
    }
    *bound.data = bound.first + offset * bound.element_bytes;
  }
  for (Flat& flat : flat_) *flat.data = flat.first + round * num_outer_ * flat.bytes_per_outer;
}

// ---- PreparedCall

PreparedCall::PreparedCall(Direction direction, const AttentionCall& call, const LaunchRecords& records)
    : direction_(direction), call_(call), records_(records), binder_(call) {
  const bool is_forward = direction == Direction::kForward;
  is_forward ? call.CheckForwardResults() : call.CheckBackwardResults();
  FillCommon();
  is_forward ? FillForward() : FillBackward();
  binder_.Finish(&common());
  const bool has_rows = call.num_outer() > 0 && call.num_q_heads() > 0 && call.q_seq_len() > 0;
  has_kernels_ = has_rows && (is_forward || call.kv_seq_len() > 0);
  if (!has_kernels_) {
    if (!is_forward) {
      for (const char* role : {"query", "key", "value"}) ZeroOnce(call.Result(role));
    }
    return;
  }
  FillWorkspace();
  FillGrids();
  FillMaps();
}

void PreparedCall::Bind(VectorParam* param, std::string_view role, const Array* array) {
  if (array != nullptr) {
    binder_.Add(&param->data, param->outer_stride, *array, call_.OuterStrides(role, array->dims));
  }
}

// (*outer, rows, heads, columns) in memory.
void PreparedCall::BindRows(TensorParam* param, std::string_view role, const Array* array) {
  if (array == nullptr) return;
  const size_t base = call_.outer_dims().size();
  param->head_stride = array->dims[base + 2];
  param->row_stride = array->dims[base + 1] * array->dims[base + 2];
  binder_.Add(&param->data, param->outer_stride, *array, call_.OuterStrides(role, array->dims));
  if (Product(array->dims) == 0) return;
  is_aligned_ = is_aligned_ && IsRowAligned(array->data, array->dims.back() * SizeOf(array->dtype));
}

void PreparedCall::BindBias(TensorParam* param, long long* column_stride, const Array* array) {
  if (array == nullptr) return;
  const auto [head, row, column] = call_.InnerStrides(array->dims);
  param->head_stride = head;
  param->row_stride = row;
  *column_stride = column;
  binder_.Add(&param->data, param->outer_stride, *array, call_.OuterStrides("bias", array->dims));
}

void PreparedCall::ZeroOnce(const Array* result) {
  if (result == nullptr || Product(result->dims) == 0) return;
  zeroed_once_.push_back({result->data, static_cast<size_t>(BytesOf(*result))});
}

void PreparedCall::FillCommon() {
  CommonParams& p = common();
  p.q_seq_len = CheckedInt(call_.q_seq_len(), "the query length");
  p.kv_seq_len = CheckedInt(call_.kv_seq_len(), "the key length");
  p.num_q_heads = CheckedInt(call_.num_q_heads(), "the number of query heads");
  p.num_kv_heads = CheckedInt(call_.num_kv_heads(), "the number of key heads");
  p.head_dim = static_cast<int>(call_.head_dim());
  p.value_head_dim = static_cast<int>(call_.value_head_dim());
  BindRows(&p.query, "query", call_.Operand("query"));
  BindRows(&p.key, "key", call_.Operand("key"));
  BindRows(&p.value, "value", call_.Operand("value"));
  call_.Required("scale");
  for (const auto& [role, param] : {std::pair<const char*, VectorParam*>("scale", &p.scale),
                                    {"q_segment_ids", &p.q_segment_ids},
                                    {"kv_segment_ids", &p.kv_segment_ids},
                                    {"q_seq_lengths", &p.q_seq_lengths},
                                    {"kv_seq_lengths", &p.kv_seq_lengths},
                                    {"q_offset", &p.q_offset},
                                    {"kv_offset", &p.kv_offset},
                                    {"sinks", &p.sinks},
                                    {"batch_index", &p.batch_index},
                                    {"head_index", &p.head_index}}) {
    Bind(param, role, call_.Operand(role));
  }
  BindBias(&p.bias, &p.bias_column_stride, call_.Operand("bias"));
  if (const Array* mask = call_.Operand("block_mask")) {
    p.block_q = CheckedInt(call_.blocks().q, "block_q");
    p.block_kv = CheckedInt(call_.blocks().kv, "block_kv");
    p.num_q_blocks = static_cast<int>(call_.num_q_blocks());
    p.num_kv_blocks = static_cast<int>(call_.num_kv_blocks());
    p.block_mask.head_stride = call_.InnerStrides(mask->dims)[0];
    // Only heads are broadcast: a single row or column of blocks is no broadcast axis.
    p.block_mask.row_stride = call_.num_kv_blocks();
    binder_.Add(&p.block_mask.data, p.block_mask.outer_stride, *mask, call_.OuterStrides("block_mask", mask->dims));
  }
  const int num_captures = CheckedInt(call_.num_captures(), "the number of captured arrays", kMaxCaptures);
  for (int number = 0; number < num_captures; ++number) {
    Bind(&p.captures[number], "capture.", &call_.Capture(number));
  }
}

void PreparedCall::FillForward() {
  BindRows(&forward_.out, "out", call_.Result("out"));
  const int64_t rows = call_.num_q_heads() * call_.q_seq_len();
  void* lse = call_.Result("lse")->data;
  binder_.AddFlat(reinterpret_cast<void**>(&forward_.lse), lse, rows * 4);
}

void PreparedCall::FillBackward() {
  BackwardParams& p = backward_;
  for (const char* role : {"out", "dout", "lse"}) call_.Required(role);
  BindRows(&p.out, "out", call_.Operand("out"));
  BindRows(&p.dout, "dout", call_.Operand("dout"));
  Bind(&p.lse, "lse", call_.Operand("lse"));
  Bind(&p.dlse, "dlse", call_.Operand("dlse"));
  BindRows(&p.dquery, "query", call_.Result("query"));
  BindRows(&p.dkey, "key", call_.Result("key"));
  BindRows(&p.dvalue, "value", call_.Result("value"));
  const Array* dscale = call_.Result("scale");
  const Array* dbias = call_.Result("bias");
  Bind(&p.dscale_result, "scale", dscale);
  BindBias(&p.dbias, &p.dbias_column_stride, dbias);
  ZeroOnce(dscale);
  ZeroOnce(dbias);
  for (int number = 0; number < call_.num_captures(); ++number) {
    const Array* dcapture = call_.Result("capture." + std::to_string(number));
    Bind(&p.dcaptures[number], "capture.", dcapture);
    ZeroOnce(dcapture);
  }
}

void PreparedCall::FillWorkspace() {
  const Array* workspace = call_.Workspace();
  auto* next = workspace == nullptr ? nullptr : static_cast<char*>(workspace->data);
  int64_t used = 0;
  // Parts are laid out for all outer elements, as Python sized them, and reused by every round.
  const auto take = [&](int64_t bytes_of_call, int64_t bytes_of_round, bool is_zeroed) -> void* {
    void* part = next == nullptr ? nullptr : next + used;
    used += RoundUp(bytes_of_call, kPartBytes);
    if (is_zeroed && part != nullptr) zeroed_.push_back({part, static_cast<size_t>(bytes_of_round)});
    return part;
  };
  const LaunchRecord& record = records_.of(is_aligned_);
  const int64_t num_outer = common().num_outer;
  const auto take_rows = [&](int64_t bytes_per_outer, bool is_zeroed) {
    void* part = take(call_.num_outer() * bytes_per_outer, num_outer * bytes_per_outer, is_zeroed);
    return static_cast<float*>(part);
  };
  const int64_t heads = call_.num_q_heads();
  void* scratch = nullptr;
  if (direction_ == Direction::kForward) {
    forward_.num_splits = record.num_splits;
    if (record.num_splits > 1) {
      const int64_t rows = 4 * record.num_splits * heads * call_.q_seq_len();
      forward_.partial_out = take_rows(rows * call_.value_head_dim(), false);
      forward_.partial_lse = take_rows(rows, false);
    }
  } else {
    backward_.padded_q_rows =
        CheckedInt(RoundUp(call_.q_seq_len(), record.q_tile), "the padded query length", int64_t{1} << 31);
    const int64_t rows = 4 * heads * backward_.padded_q_rows;
    if (record.accumulator_head_dim > 0) {
      backward_.dquery_accumulator = take_rows(rows * record.accumulator_head_dim, true);
    }
    backward_.delta = take_rows(rows, false);
    backward_.lse_log2 = take_rows(rows, false);
    if (backward_.dscale_result.data != nullptr) backward_.dscale = take_rows(4, true);
  }
  if (record.scratch_bytes > 0) scratch = take(record.scratch_bytes, record.scratch_bytes, true);
  (direction_ == Direction::kForward ? forward_.scratch : backward_.scratch) = scratch;
  const int64_t given = workspace == nullptr ? 0 : Product(workspace->dims);
  if (given < used) {
    throw InvalidCall("the workspace has " + std::to_string(given) + " bytes, the kernels need " +
                      std::to_string(used));
  }
  if (reinterpret_cast<uintptr_t>(next) % kRowAlignment != 0) {
    throw InvalidCall("the workspace does not start at a multiple of 16 bytes");
  }
}

void PreparedCall::FillGrids() {
  const int64_t group = call_.num_q_heads() / call_.num_kv_heads();
  const int64_t rows[] = {1, call_.q_seq_len(), call_.kv_seq_len(), call_.q_seq_len() * group};
  const int64_t heads[] = {1, call_.num_q_heads(), call_.num_kv_heads()};
  const LaunchRecord& record = records_.of(is_aligned_);
  for (const KernelRecord& kernel : record.kernels) {
    int64_t blocks = CeilDiv(rows[kernel.rows], kernel.tile) * heads[kernel.heads];
    constexpr int64_t kLargest = std::numeric_limits<int>::max();
    // Each factor is below 2^31, so a product that passed this test cannot overflow the next.
    const auto times = [&](int64_t factor) { blocks = blocks > kLargest ? blocks : blocks * factor; };
    if (kernel.is_per_outer) times(common().num_outer);
    if (kernel.is_per_split) times(record.num_splits);
    if (blocks > kLargest) {
      throw InvalidCall("the call has " + std::to_string(blocks) + " blocks or more, CUDA takes " +
                        std::to_string(kLargest) + "; split its batch");
    }
    if (kernel.max_blocks > 0) blocks = std::min<int64_t>(blocks, kernel.max_blocks);
    grids_.push_back({.blocks = static_cast<unsigned>(std::max<int64_t>(blocks, 1)),
                      .threads = static_cast<unsigned>(kernel.threads),
                      .shared_bytes = static_cast<unsigned>(kernel.shared_bytes)});
  }
}

const TensorParam& PreparedCall::ParamOf(MapArray array) const {
  const bool is_forward = direction_ == Direction::kForward;
  const CommonParams& common = is_forward ? forward_.common : backward_.common;
  switch (array) {
    case MapArray::kQuery: return common.query;
    case MapArray::kKey: return common.key;
    case MapArray::kValue: return common.value;
    case MapArray::kOut: return is_forward ? forward_.out : backward_.out;
    case MapArray::kDout: return backward_.dout;
    case MapArray::kDquery: return backward_.dquery;
    case MapArray::kDkey: return backward_.dkey;
    case MapArray::kDvalue: return backward_.dvalue;
  }
  ThrowDamaged("a tensor map of no array");
}

const Array* PreparedCall::ArrayOf(MapArray array) const {
  switch (array) {
    case MapArray::kQuery: return call_.Operand("query");
    case MapArray::kKey: return call_.Operand("key");
    case MapArray::kValue: return call_.Operand("value");
    case MapArray::kOut: return direction_ == Direction::kForward ? call_.Result("out") : call_.Operand("out");
    case MapArray::kDout: return call_.Operand("dout");
    case MapArray::kDquery: return call_.Result("query");
    case MapArray::kDkey: return call_.Result("key");
    case MapArray::kDvalue: return call_.Result("value");
  }
  return nullptr;
}

void PreparedCall::FillMaps() {
  const std::vector<MapRecord>& records = records_.of(is_aligned_).maps;
  TensorMaps& maps = direction_ == Direction::kForward ? forward_.maps : backward_.maps;
  for (size_t m = 0; m < records.size(); ++m) {
    const Array* array = ArrayOf(records[m].array);
    if (array == nullptr || Product(array->dims) == 0) continue;  // nobody reads it
    const TensorParam& param = ParamOf(records[m].array);
    const size_t rank = array->dims.size();
    const int64_t columns = array->dims[rank - 1], heads = array->dims[rank - 2], rows = array->dims[rank - 3];
    const int64_t outer_elements = columns * heads * rows;
    for (size_t axis = 0; axis < kMaxOuter; ++axis) {
      maps.outer_stride[m][axis] =
          CheckedInt(param.outer_stride[axis] / outer_elements, "a batch or vmap axis", int64_t{1} << 31);
    }
    maps_.push_back({.map = &maps.map[m],
                     .data = &param.data,
                     .first = static_cast<char*>(array->data),
                     .dtype = array->dtype,
                     .dims = {columns, heads, rows, Product(array->dims) / outer_elements},
                     .box = {records[m].columns, 1, records[m].rows, 1}});
  }
}

}  // namespace fkl::cuda
