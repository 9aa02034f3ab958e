// Small files, whole.
#ifndef FKL_FFI_CUDA_FILES_H_
#define FKL_FFI_CUDA_FILES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fkl::cuda {

std::optional<std::string> ReadFile(const std::string& path);

// Makes the folders, writes beside, syncs and renames: a reader sees the old file, none, or the
// whole new one. An empty string on success, else what failed.
std::string ReplaceFile(const std::string& path, std::string_view content);

// Marks a file as used now, for `KeepNewest`; where that is not allowed, nothing happens.
void MarkUsed(const std::string& path);

// Removes the files of a folder that were written or marked the longest ago, if together they have more than
// `max_bytes`, until they have little enough for a while; returns how many. Others may read, write and remove at the
// same time.
int KeepNewest(const std::string& dir, int64_t max_bytes);

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_FILES_H_
