// Where an outer element's data starts: the coordinates of an outer index and the offsets they give.
#ifndef FKL_DEVICE_ATTENTION_OUTER_CUH_
#define FKL_DEVICE_ATTENTION_OUTER_CUH_

#include "attention/params.cuh"
#include "core/types.cuh"

namespace fkl {

struct OuterIndex {
  int axis[kMaxOuterAxes];
};

FKL_DEVICE OuterIndex outer_index(const CommonParams& params, long long outer) {
  OuterIndex index;
#pragma unroll
  for (int a = kMaxOuterAxes - 1; a >= 0; --a) {
    index.axis[a] = 0;
    if (a < params.num_outer_axes) {
      // The host merges axes, so this loop nearly always has one turn and no division.
      index.axis[a] = a == 0 ? static_cast<int>(outer) : static_cast<int>(outer % params.outer_size[a]);
      if (a > 0) outer /= params.outer_size[a];
    }
  }
  return index;
}

// In elements.
FKL_DEVICE long long outer_offset(const long long (&stride)[kMaxOuterAxes], const OuterIndex& outer) {
  long long offset = 0;
#pragma unroll
  for (int a = 0; a < kMaxOuterAxes; ++a) offset += stride[a] * outer.axis[a];
  return offset;
}

// The start of an outer element's data, null if the operand is not given.
template <class T>
FKL_DEVICE T* at_outer(const VectorParam& param, const OuterIndex& outer) {
  T* data = static_cast<T*>(param.data);
  return data == nullptr ? nullptr : data + outer_offset(param.outer_stride, outer);
}

// Where an outer element is along the last axis of tensor map `map`.
FKL_DEVICE int map_outer(const TensorMaps& maps, int map, const OuterIndex& outer) {
  int coordinate = 0;
#pragma unroll
  for (int a = 0; a < kMaxOuterAxes; ++a) coordinate += maps.outer_stride[map][a] * outer.axis[a];
  return coordinate;
}

// The same of one head: row r starts row_stride elements further each.
template <class T>
FKL_DEVICE T* at_outer(const TensorParam& param, const OuterIndex& outer, int head) {
  T* data = static_cast<T*>(param.data);
  return data == nullptr ? nullptr : data + outer_offset(param.outer_stride, outer) + param.head_stride * head;
}

// An optional integer per outer element.
FKL_DEVICE int int_or(const VectorParam& param, const OuterIndex& outer, int otherwise) {
  const int* data = at_outer<const int>(param, outer);
  return data == nullptr ? otherwise : __ldg(data);
}

// Arithmetic on indices wraps like the mods' own.
FKL_DEVICE int wrapping_add(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }

FKL_DEVICE int global_batch(const CommonParams& params, const OuterIndex& outer) { return int_or(params.batch_index, outer, 0); }

FKL_DEVICE int global_head(const CommonParams& params, const OuterIndex& outer, int head) {
  const int* heads = at_outer<const int>(params.head_index, outer);
  return heads == nullptr ? head : __ldg(heads + head);
}

}  // namespace fkl

#endif  // FKL_DEVICE_ATTENTION_OUTER_CUH_
