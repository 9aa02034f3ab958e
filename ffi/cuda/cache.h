// Compiled glue on disk, docs/cuda.md section 4.
#ifndef FKL_FFI_CUDA_CACHE_H_
#define FKL_FFI_CUDA_CACHE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace fkl::cuda {

// Since the process started.
struct CacheCounts {
  int64_t compiled = 0, disk_hits = 0, broken_entries = 0, failed_writes = 0, evicted = 0;
};
CacheCounts GetCacheCounts();

// SHA-256 of all that decides what the compiler makes.
std::string CacheKey(const std::string& glue, const std::string& arch, bool aligned);

// The cubin of a glue, from disk or compiled and kept there. Threads that ask for the same at the
// same time wait for one of them; a failure is reported to each and tried again by the next.
std::string GetCubin(const std::string& glue, const std::string& arch, bool aligned, std::string_view origin);

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_CACHE_H_
