// The XLA custom calls of the CPU backend, described in docs/internals.md section 3.
#ifndef FKL_FFI_ATTENTION_HANDLERS_H_
#define FKL_FFI_ATTENTION_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

namespace fkl {

XLA_FFI_Error* AttentionForwardCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* AttentionBackwardCpu(XLA_FFI_CallFrame* call_frame);

}  // namespace fkl

#endif  // FKL_FFI_ATTENTION_HANDLERS_H_
