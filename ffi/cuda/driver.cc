#include "cuda/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "cuda/settings.h"

namespace fkl::cuda {
namespace {

constexpr int kOldestArch = 80;
constexpr int kMaxDevices = 64;

struct Library {
  void* handle = nullptr;
  std::string error;
};

Library Open(const std::string& path, int flags) {
  Library library;
  library.handle = dlopen(path.c_str(), flags);
  if (library.handle == nullptr) {
    const char* error = dlerror();
    library.error = error == nullptr ? path + " cannot be opened" : error;
  }
  return library;
}

template <class F>
void Find(void* handle, const char* symbol, F* function) {
  *function = reinterpret_cast<F>(dlsym(handle, symbol));
  if (*function == nullptr) throw CudaError(std::string("the library has no function ") + symbol + "; it is too old");
}

#define FKL_FIND(handle, api, name) Find(handle, #name, &(api)->name)

void OpenDriver(Driver* driver) {
  const Library library = Open("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library.handle == nullptr) {
    throw CudaError("the NVIDIA driver is missing: " + library.error);
  }
  void* handle = library.handle;
  FKL_FIND(handle, driver, cuInit);
  FKL_FIND(handle, driver, cuDriverGetVersion);
  FKL_FIND(handle, driver, cuGetErrorName);
  FKL_FIND(handle, driver, cuGetErrorString);
  FKL_FIND(handle, driver, cuDeviceGetCount);
  FKL_FIND(handle, driver, cuDeviceGet);
  FKL_FIND(handle, driver, cuDeviceGetName);
  FKL_FIND(handle, driver, cuDeviceGetAttribute);
  FKL_FIND(handle, driver, cuDevicePrimaryCtxRetain);
  FKL_FIND(handle, driver, cuCtxGetCurrent);
  // The names without a version are those of CUDA 3, with another context type.
  Find(handle, "cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent);
  Find(handle, "cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent);
  FKL_FIND(handle, driver, cuModuleLoadData);
  FKL_FIND(handle, driver, cuModuleUnload);
  FKL_FIND(handle, driver, cuModuleGetFunction);
  FKL_FIND(handle, driver, cuFuncSetAttribute);
  FKL_FIND(handle, driver, cuLaunchKernel);
  FKL_FIND(handle, driver, cuMemsetD8Async);
  FKL_FIND(handle, driver, cuThreadExchangeStreamCaptureMode);
  // Not required: only kernels for 9.0 ask for maps.
  driver->cuTensorMapEncodeTiled =
      reinterpret_cast<decltype(driver->cuTensorMapEncodeTiled)>(dlsym(handle, "cuTensorMapEncodeTiled"));
  driver->Check(driver->cuInit(0), "cuInit");
  driver->Check(driver->cuDriverGetVersion(&driver->version), "cuDriverGetVersion");
}

void FindNvrtcFunctions(void* handle, Nvrtc* nvrtc) {
  FKL_FIND(handle, nvrtc, nvrtcVersion);
  FKL_FIND(handle, nvrtc, nvrtcGetErrorString);
  FKL_FIND(handle, nvrtc, nvrtcGetNumSupportedArchs);
  FKL_FIND(handle, nvrtc, nvrtcGetSupportedArchs);
  FKL_FIND(handle, nvrtc, nvrtcCreateProgram);
  FKL_FIND(handle, nvrtc, nvrtcDestroyProgram);
  FKL_FIND(handle, nvrtc, nvrtcCompileProgram);
  FKL_FIND(handle, nvrtc, nvrtcGetCUBINSize);
  FKL_FIND(handle, nvrtc, nvrtcGetCUBIN);
  FKL_FIND(handle, nvrtc, nvrtcGetProgramLogSize);
  FKL_FIND(handle, nvrtc, nvrtcGetProgramLog);
  nvrtc->Check(nvrtc->nvrtcVersion(&nvrtc->major, &nvrtc->minor), "nvrtcVersion");
  int count = 0;
  nvrtc->Check(nvrtc->nvrtcGetNumSupportedArchs(&count), "nvrtcGetNumSupportedArchs");
  nvrtc->archs.resize(static_cast<size_t>(count));
  nvrtc->Check(nvrtc->nvrtcGetSupportedArchs(nvrtc->archs.data()), "nvrtcGetSupportedArchs");
  std::sort(nvrtc->archs.begin(), nvrtc->archs.end());
}

#undef FKL_FIND

// Where a dlopen found it, for the doctor.
std::string PathOf(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "not known";
}

// The version of the driver if there is one: a driver cannot load what a newer major version of
// NVRTC makes.
int DriverMajorOr(int otherwise) {
  try {
    return GetDriver().version / 1000;
  } catch (const CudaError&) {
    return otherwise;  // compiling needs no driver
  }
}

void OpenNvrtc(Nvrtc* nvrtc) {
  struct Candidate {
    std::string path;
    int flags;
  };
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL;
  const Settings settings = GetSettings();
  const int newest_major = DriverMajorOr(13);
  std::vector<Candidate> candidates;
  if (!settings.nvrtc.empty()) candidates.push_back({settings.nvrtc, kFlags});
  for (const int major : {13, 12}) {
    if (major > newest_major) continue;
    const std::string name = "libnvrtc.so." + std::to_string(major);
    candidates.push_back({name, kFlags | RTLD_NOLOAD});  // JAX's own plugin may have opened it
    for (const std::string& dir : settings.library_dirs) candidates.push_back({dir + "/" + name, kFlags});
    candidates.push_back({name, kFlags});
  }
  std::string error;
  for (const Candidate& candidate : candidates) {
    const Library library = Open(candidate.path, candidate.flags);
    if (library.handle == nullptr) {
      if (candidate.path == settings.nvrtc) throw CudaError("FKL_JAX_NVRTC cannot be opened: " + library.error);
      continue;
    }
    try {
      FindNvrtcFunctions(library.handle, nvrtc);
      nvrtc->path = PathOf(reinterpret_cast<void*>(nvrtc->nvrtcVersion));
      return;
    } catch (const CudaError& failure) {
      error = candidate.path + ": " + failure.what();
    }
  }
  const std::string major = std::to_string(std::min(newest_major, 13));
  throw CudaError("no NVRTC library for CUDA " + major + " was found" + (error.empty() ? "" : " (" + error + ")") +
                  "; install " + (major == "12" ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc") +
                  " (part of jax[cuda" + major + "]) or set FKL_JAX_NVRTC to libnvrtc.so." + major);
}

// A value that is made at the first successful call of `make`, without a lock afterwards.
template <class T>
class Lazy {
 public:
  template <class F>
  const T& Get(F make) {
    if (const T* value = value_.load(std::memory_order_acquire)) return *value;
    const std::lock_guard lock(mutex_);
    if (const T* value = value_.load(std::memory_order_relaxed)) return *value;
    owner_ = std::make_unique<T>();
    make(owner_.get());
    value_.store(owner_.get(), std::memory_order_release);
    return *owner_;
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<T> owner_;
  std::atomic<const T*> value_{nullptr};
};

// Never destroyed: handlers may still run while the process ends.
template <class T>
T& Forever() {
  static T* value = new T;
  return *value;
}

void FindDeviceInfo(int index, DeviceInfo* info) {
  const Driver& driver = GetDriver();
  Device device = 0;
  driver.Check(driver.cuDeviceGet(&device, index), "cuDeviceGet(" + std::to_string(index) + ")");
  char name[256] = {};
  driver.Check(driver.cuDeviceGetName(name, sizeof(name) - 1, device), "cuDeviceGetName");
  info->name = name;
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    driver.Check(driver.cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  info->arch = 10 * attribute(kComputeCapabilityMajor) + attribute(kComputeCapabilityMinor);
  info->max_shared_bytes = attribute(kMaxSharedMemoryPerBlockOptin);
  info->num_multiprocessors = attribute(kMultiprocessorCount);
}

struct DeviceInfos {
  std::array<Lazy<DeviceInfo>, kMaxDevices> of;
};
struct PrimaryContext {
  Context context = nullptr;
};
struct PrimaryContexts {
  std::array<Lazy<PrimaryContext>, kMaxDevices> of;
};

size_t CheckedIndex(int device) {
  if (device < 0 || device >= kMaxDevices) {
    throw CudaError("device ordinal " + std::to_string(device) + " is beyond " + std::to_string(kMaxDevices - 1));
  }
  return static_cast<size_t>(device);
}

// Retained once and never released, like XLA's own.
Context PrimaryContextOf(int index) {
  return Forever<PrimaryContexts>()
      .of[CheckedIndex(index)]
      .Get([&](PrimaryContext* primary) {
        const Driver& driver = GetDriver();
        Device device = 0;
        driver.Check(driver.cuDeviceGet(&device, index), "cuDeviceGet(" + std::to_string(index) + ")");
        driver.Check(driver.cuDevicePrimaryCtxRetain(&primary->context, device), "cuDevicePrimaryCtxRetain");
      })
      .context;
}

}  // namespace

void Driver::Check(Result result, std::string_view call) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  throw CudaError(std::string(call) + " failed with code " + std::to_string(result) + " (" + (name ? name : "unnamed") +
                  "): " + (text ? text : "no further text"));
}

void Nvrtc::Check(Result result, std::string_view call) const {
  if (result == 0) return;
  throw CudaError(std::string(call) + " failed with code " + std::to_string(result) + " (" +
                  nvrtcGetErrorString(result) + ")");
}

const Driver& GetDriver() { return Forever<Lazy<Driver>>().Get(&OpenDriver); }
const Nvrtc& GetNvrtc() { return Forever<Lazy<Nvrtc>>().Get(&OpenNvrtc); }

int NumDevices() {
  const Driver& driver = GetDriver();
  int count = 0;
  driver.Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

const DeviceInfo& GetDeviceInfo(int device) {
  return Forever<DeviceInfos>().of[CheckedIndex(device)].Get([&](DeviceInfo* info) {
    FindDeviceInfo(device, info);
    if (info->arch < kOldestArch) {
      throw CudaError(info->name + " has compute capability " + std::to_string(info->arch / 10) + "." +
                      std::to_string(info->arch % 10) + "; the kernels need 8.0 or newer");
    }
  });
}

ScopedContext::ScopedContext(int device) : driver_(GetDriver()) {
  const Context primary = PrimaryContextOf(device);
  Context current = nullptr;
  driver_.Check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == primary) return;
  driver_.Check(driver_.cuCtxPushCurrent(primary), "cuCtxPushCurrent");
  is_pushed_ = true;
}

ScopedContext::~ScopedContext() {
  Context popped = nullptr;
  if (is_pushed_) driver_.cuCtxPopCurrent(&popped);
}

}  // namespace fkl::cuda
