// The CUDA part of the Python module.
#ifndef FKL_FFI_CUDA_CUDA_BINDINGS_H_
#define FKL_FFI_CUDA_CUDA_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace fkl::cuda {

void Bind(nanobind::module_& m);
// Stages of the custom calls by name.
nanobind::dict Handlers();

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_CUDA_BINDINGS_H_
