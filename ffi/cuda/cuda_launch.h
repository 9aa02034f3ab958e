// How the kernels of a call are launched: the record `cuda_launch` (docs/cuda.md section 1.1,
// written by fkl_jax/_cuda_launch.py) and a decoded call make parameters, grids and memory to zero.
// Nothing here calls CUDA.
#ifndef FKL_FFI_CUDA_CUDA_LAUNCH_H_
#define FKL_FFI_CUDA_CUDA_LAUNCH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention_call.h"
#include "device/attention/params.cuh"

namespace fkl::cuda {

enum class Direction { kForward, kBackward };

struct KernelRecord {
  int threads, shared_bytes;
  int rows;  // 0: one, 1: query rows, 2: keys, 3: query rows times group
  int tile;
  int heads;  // 0: one, 1: query heads, 2: key/value heads
  bool is_per_outer, is_per_split;
  int max_blocks;  // 0: any
};

// Arrays that TMA may read or write, in the order of their numbers in a record.
enum class MapArray : int { kQuery, kKey, kValue, kOut, kDout, kDquery, kDkey, kDvalue };

struct MapRecord {
  MapArray array;
  int rows, columns;  // of a box
};

// Of one alignment class.
struct LaunchRecord {
  int num_splits = 1;
  int q_tile = 1;
  int accumulator_head_dim = 0;
  int64_t scratch_bytes = 0;
  std::vector<KernelRecord> kernels;
  std::vector<MapRecord> maps;
};
struct LaunchRecords {
  std::vector<LaunchRecord> classes;  // one for all calls, or those with aligned rows and the others

  const LaunchRecord& of(bool aligned) const { return aligned ? classes.front() : classes.back(); }
};
// Throws InvalidCall if the numbers are no such record.
LaunchRecords DecodeLaunch(std::span<const int32_t> numbers);

struct Memory {
  void* data;
  size_t bytes;
};

// Whether vectors of 16 bytes may be read from every row: they lie one after the other, so all of them are aligned if
// the first is and a row is a multiple.
bool IsRowAligned(const void* first, int64_t row_bytes);

// What a tensor map is made from. Axes: column, head, row, outer element of the array.
struct MapSource {
  TensorMap* map;
  void* const* data;  // where the array starts in this round
  char* first;        // and in the call
  DType dtype;
  int64_t dims[4];
  int64_t box[4];

  int64_t outer_bytes() const { return dims[0] * dims[1] * dims[2] * SizeOf(dtype); }
  // Outer elements from this round's start on.
  int64_t num_outer() const { return dims[3] - (static_cast<char*>(*data) - first) / outer_bytes(); }
};

// Connects arrays to members of a parameter struct: strides once, addresses anew in every round.
class OuterBinder {
 public:
  explicit OuterBinder(const AttentionCall& call) : outer_dims_(call.outer_dims()) { bound_.reserve(32); }

  // `strides` along the call's outer axes, in elements.
  void Add(void** data, long long* outer_stride, const Array& array, Dims strides);
  // An array whose elements follow the flat number of the outer element.
  void AddFlat(void** data, void* first, int64_t bytes_per_outer);
  // Merges axes and writes strides.
  void Finish(CommonParams* common);
  int64_t num_rounds() const { return num_rounds_; }
  void SetRound(int64_t round);

 private:
  struct Bound {
    void** data;
    char* first;
    long long* outer_stride;
    int element_bytes;
    Dims strides;  // along the call's outer axes; after Finish, along those of rounds, at the front
  };
  struct Flat {
    void** data;
    char* first;
    int64_t bytes_per_outer;
  };

  Dims outer_dims_;
  std::vector<Bound> bound_;
  std::vector<Flat> flat_;
  Dims round_dims_;                         // axes that the kernels do not go through themselves
  int64_t num_rounds_ = 1, num_outer_ = 1;  // of a round
};

struct Grid {
  unsigned blocks, threads, shared_bytes;
};

// A call ready to be launched. The parameters point into the object: it stays where it is.
class PreparedCall {
 public:
  PreparedCall(Direction direction, const AttentionCall& call, const LaunchRecords& records);
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  bool has_kernels() const { return has_kernels_; }  // or it is enough to zero the results
  bool is_aligned() const { return is_aligned_; }
  int64_t num_rounds() const { return binder_.num_rounds(); }
  void SetRound(int64_t round) { binder_.SetRound(round); }
  void* params() { return direction_ == Direction::kForward ? static_cast<void*>(&forward_) : &backward_; }
  const ForwardParams& forward() const { return forward_; }
  const BackwardParams& backward() const { return backward_; }
  const std::vector<Grid>& grids() const { return grids_; }                // by kernel, of every round
  const std::vector<MapSource>& maps() const { return maps_; }             // to be made in every round
  const std::vector<Memory>& zeroed_once() const { return zeroed_once_; }  // before the first round
  const std::vector<Memory>& zeroed() const { return zeroed_; }            // before every round

 private:
  CommonParams& common() { return direction_ == Direction::kForward ? forward_.common : backward_.common; }
  void FillCommon();
  void FillForward();
  void FillBackward();
  void FillWorkspace();
  void FillGrids();
  void FillMaps();
  const TensorParam& ParamOf(MapArray array) const;
  const Array* ArrayOf(MapArray array) const;
  void Bind(VectorParam* param, std::string_view role, const Array* array);
  void BindRows(TensorParam* param, std::string_view role, const Array* array);
  void BindBias(TensorParam* param, long long* column_stride, const Array* array);
  void ZeroOnce(const Array* result);

  const Direction direction_;
  const AttentionCall& call_;
  const LaunchRecords& records_;
  OuterBinder binder_;
  ForwardParams forward_ = {};
  BackwardParams backward_ = {};
  bool has_kernels_ = false;
  bool is_aligned_ = true;
  std::vector<Grid> grids_;
  std::vector<MapSource> maps_;
  std::vector<Memory> zeroed_once_, zeroed_;
};

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_CUDA_LAUNCH_H_
