// The XLA custom calls of the CUDA backend, docs/cuda.md. Registered in two stages: `initialize`
// compiles and loads, before every execution and hence usually in vain; `execute` only launches and
// may be captured in a graph.
#ifndef FKL_FFI_CUDA_ATTENTION_CUDA_H_
#define FKL_FFI_CUDA_ATTENTION_CUDA_H_

#include "xla/ffi/api/c_api.h"

namespace fkl {

XLA_FFI_Error* InitializeAttentionCuda(XLA_FFI_CallFrame* call_frame);  // of both
XLA_FFI_Error* AttentionForwardCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* AttentionBackwardCuda(XLA_FFI_CallFrame* call_frame);

}  // namespace fkl

#endif  // FKL_FFI_CUDA_ATTENTION_CUDA_H_
