// What Python hands over: folders and files, never read from the environment here.
#ifndef FKL_FFI_CUDA_SETTINGS_H_
#define FKL_FFI_CUDA_SETTINGS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace fkl::cuda {

struct Settings {
  std::string device_dir;                 // fkl_jax/device
  std::string nvrtc;                      // a library to take before all others, or empty
  std::vector<std::string> library_dirs;  // may hold libnvrtc; they need not exist
  std::string cache_dir;                  // empty: no disk cache
  std::string dump_dir;                   // empty: sources are not kept
  int64_t cache_bytes = 0;                // that the disk cache may take, 0: any
};

void SetSettings(Settings settings);
Settings GetSettings();

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_SETTINGS_H_
