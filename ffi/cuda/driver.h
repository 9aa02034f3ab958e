// The CUDA driver and NVRTC, opened when first needed: the package installs and imports without
// either.
//
// Their few functions are declared here, with the names of the vendor's reference, so that no CUDA
// header is needed.
#ifndef FKL_FFI_CUDA_DRIVER_H_
#define FKL_FFI_CUDA_DRIVER_H_

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fkl::cuda {

// A sentence for the user.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Result = int;  // 0 is success
using Device = int;
using DevicePtr = unsigned long long;
struct ContextHandle;
struct ModuleHandle;
struct FunctionHandle;
struct StreamHandle;
struct ProgramHandle;
using Context = ContextHandle*;
using Module = ModuleHandle*;
using Function = FunctionHandle*;
using Stream = StreamHandle*;
using Program = ProgramHandle*;

struct TensorMapHandle;
using TensorMapPtr = TensorMapHandle*;  // 128 bytes, aligned to 64

// Numbers of the driver's enumerations.
enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};
enum FunctionAttribute : int { kMaxDynamicSharedSizeBytes = 8 };
enum TensorMapDataType : int { kTensorMapFloat16 = 6, kTensorMapFloat32 = 7, kTensorMapBFloat16 = 9 };
enum TensorMapSwizzle : int { kSwizzleNone = 0, kSwizzle32 = 1, kSwizzle64 = 2, kSwizzle128 = 3 };
enum TensorMapL2Promotion : int { kL2Promotion128 = 2 };
enum StreamCaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };

struct Driver {
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuGetErrorName)(Result, const char**);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(Device*, int);
  Result (*cuDeviceGetName)(char*, int, Device);
  Result (*cuDeviceGetAttribute)(int*, int, Device);
  Result (*cuDevicePrimaryCtxRetain)(Context*, Device);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxPushCurrent)(Context);
  Result (*cuCtxPopCurrent)(Context*);
  Result (*cuModuleLoadData)(Module*, const void*);
  Result (*cuModuleUnload)(Module);
  Result (*cuModuleGetFunction)(Function*, Module, const char*);
  Result (*cuFuncSetAttribute)(Function, int, int);
  Result (*cuLaunchKernel)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream, void** params,
                           void** extra);
  Result (*cuMemsetD8Async)(DevicePtr, unsigned char, size_t, Stream);
  Result (*cuThreadExchangeStreamCaptureMode)(int*);
  // Of CUDA 12 and newer; null in older drivers.
  Result (*cuTensorMapEncodeTiled)(TensorMapPtr, int data_type, unsigned rank, void* address,
                                   const unsigned long long* dims, const unsigned long long* strides,
                                   const unsigned* box, const unsigned* element_strides, int interleave, int swizzle,
                                   int l2_promotion, int out_of_bounds_fill);

  int version = 0;  // 12040 is CUDA 12.4

  // Throws a sentence with the call, the code and its name, unless `result` is success.
  void Check(Result result, std::string_view call) const;
};

struct Nvrtc {
  Result (*nvrtcVersion)(int*, int*);
  const char* (*nvrtcGetErrorString)(Result);
  Result (*nvrtcGetNumSupportedArchs)(int*);
  Result (*nvrtcGetSupportedArchs)(int*);
  Result (*nvrtcCreateProgram)(Program*, const char* text, const char* name, int num_headers,
                               const char* const* header_texts, const char* const* header_names);
  Result (*nvrtcDestroyProgram)(Program*);
  Result (*nvrtcCompileProgram)(Program, int num_options, const char* const* options);
  Result (*nvrtcGetCUBINSize)(Program, size_t*);
  Result (*nvrtcGetCUBIN)(Program, char*);
  Result (*nvrtcGetProgramLogSize)(Program, size_t*);
  Result (*nvrtcGetProgramLog)(Program, char*);

  int major = 0, minor = 0;
  std::string path;
  std::vector<int> archs;  // compute capability times ten, ascending

  void Check(Result result, std::string_view call) const;
};

// Opened at the first call and kept; they throw a CudaError that says what is missing. A failure is
// looked at again by the next call: what is missing may have been installed, or found under other
// settings.
const Driver& GetDriver();
const Nvrtc& GetNvrtc();

struct DeviceInfo {
  std::string name;
  int arch = 0;  // compute capability times ten
  int max_shared_bytes = 0;
  int num_multiprocessors = 0;
};

int NumDevices();
// Facts of a device, asked once.
const DeviceInfo& GetDeviceInfo(int device);

// Makes the primary context of a device current for a scope, if it is not.
class ScopedContext {
 public:
  explicit ScopedContext(int device);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  bool is_pushed_ = false;
};

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_DRIVER_H_
