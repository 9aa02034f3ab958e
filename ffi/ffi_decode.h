// From XLA's view of a custom call to an AttentionCall, the same for every platform.
#ifndef FKL_FFI_FFI_DECODE_H_
#define FKL_FFI_FFI_DECODE_H_

#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "attention_call.h"
#include "ffi_checks.h"
#include "xla/ffi/api/ffi.h"

namespace fkl {

template <class T>
T Attribute(const xla::ffi::Dictionary& attributes, const char* name) {
  auto value = attributes.get<T>(name);
  if (value.has_error()) {
    throw InvalidCall("attribute '" + std::string(name) + "' is missing or has another type");
  }
  return value.value();
}

// Calls `visit(role, index)` for each of the roles, which are separated by blanks; returns their
// number.
template <class F>
size_t ForEachRole(std::string_view roles, F visit) {
  size_t count = 0;
  while (!roles.empty()) {
    const size_t blank = roles.find(' ');
    visit(roles.substr(0, blank), count++);
    roles = blank == std::string_view::npos ? std::string_view() : roles.substr(blank + 1);
  }
  return count;
}

AttentionCall DecodeCall(const xla::ffi::RemainingArgs& args, const xla::ffi::RemainingRets& rets,
                         const xla::ffi::Dictionary& attributes);

// Runs `function`; what it throws becomes an XLA error.
template <class F>
xla::ffi::Error Guarded(F function) {
  using xla::ffi::ErrorCode;
  try {
    function();
    return xla::ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return xla::ffi::Error(ErrorCode::kInvalidArgument, error.what());
  } catch (const std::bad_alloc&) {
    return xla::ffi::Error(ErrorCode::kResourceExhausted, "attention: out of memory");
  } catch (const std::exception& error) {
    return xla::ffi::Error(ErrorCode::kInternal, std::string("attention: ") + error.what());
  } catch (...) {
    return xla::ffi::Error(ErrorCode::kInternal, "attention: unknown failure");
  }
}

}  // namespace fkl

#endif  // FKL_FFI_FFI_DECODE_H_
