#include "cuda/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

namespace fkl::cuda {
namespace {

namespace fs = std::filesystem;

std::string Failure(const std::string& what, const std::string& path) {
  return what + " " + path + ": " + std::strerror(errno);
}

std::string WriteSynced(const std::string& path, std::string_view content) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return Failure("cannot create", path);
  std::string failure;
  while (!content.empty() && failure.empty()) {
    const ssize_t written = write(file, content.data(), content.size());
    if (written >= 0) {
      content.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      failure = Failure("cannot write", path);
    }
  }
  if (failure.empty() && fsync(file) != 0) failure = Failure("cannot sync", path);
  if (close(file) != 0 && failure.empty()) failure = Failure("cannot close", path);
  return failure;
}

}  // namespace

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) return std::nullopt;
  return content;
}

std::string ReplaceFile(const std::string& path, std::string_view content) {
  static std::atomic<int> counter{0};
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (error) return "cannot make the folder of " + path + ": " + error.message();
  // No other process or thread writes a file of this name.
  const std::string beside = path + "." + std::to_string(getpid()) + "." + std::to_string(counter++) + ".tmp";
  unlink(beside.c_str());  // of a process that died and had our number
  std::string failure = WriteSynced(beside, content);
  if (failure.empty() && rename(beside.c_str(), path.c_str()) != 0) failure = Failure("cannot rename", beside);
  if (!failure.empty()) unlink(beside.c_str());
  return failure;
}

void MarkUsed(const std::string& path) {
  std::error_code ignored;
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);
}

int KeepNewest(const std::string& dir, int64_t max_bytes) {
  struct File {
    fs::file_time_type used;
    int64_t bytes;
    fs::path path;
  };
  std::vector<File> files;
  int64_t total = 0;
  std::error_code error;
  for (fs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;  // another process was faster
    const auto bytes = static_cast<int64_t>(it->file_size(gone));
    const fs::file_time_type used = it->last_write_time(gone);
    if (gone) continue;
    files.push_back({used, bytes, it->path()});
    total += bytes;
  }
  if (total <= max_bytes) return 0;
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used < b.used; });
  int removed = 0;
  // A tenth is left free, so that this is not done for every new file.
  for (const File& file : files) {
    if (total <= max_bytes - max_bytes / 10) break;
    removed += fs::remove(file.path, error);
    total -= file.bytes;
  }
  return removed;
}

}  // namespace fkl::cuda
