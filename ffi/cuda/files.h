// Small files, whole.
#ifndef FKL_FFI_CUDA_FILES_H_
#define FKL_FFI_CUDA_FILES_H_

#include <optional>
#include <string>
#include <string_view>

namespace fkl::cuda {

std::optional<std::string> ReadFile(const std::string& path);

// Makes the folders, writes beside, syncs and renames: a reader sees the old file, none, or the
// whole new one. An empty string on success, else what failed.
std::string ReplaceFile(const std::string& path, std::string_view content);

}  // namespace fkl::cuda

#endif  // FKL_FFI_CUDA_FILES_H_
