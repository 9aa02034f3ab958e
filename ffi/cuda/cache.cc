#include "cuda/cache.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "cuda/compile.h"
#include "cuda/driver.h"
#include "cuda/files.h"
#include "cuda/settings.h"
#include "cuda/sha256.h"

namespace fkl::cuda {
namespace {

// An entry: this line, the SHA-256 of the rest in hexadecimal, a line end, the cubin.
constexpr std::string_view kMagic = "fkl_jax cubin 1\n";
constexpr size_t kChecksumDigits = 64;

struct Counters {
  std::atomic<int64_t> compiled{0}, disk_hits{0}, broken_entries{0}, failed_writes{0}, evicted{0};
};
Counters& Global() {
  static Counters counters;
  return counters;
}

std::string EntryOf(const std::string& cubin) {
  return std::string(kMagic) + Sha256().Add(cubin).Finish() + "\n" + cubin;
}

// The cubin in an entry, nothing if the entry is not whole.
std::optional<std::string> CubinOf(std::string_view entry) {
  const size_t header = kMagic.size() + kChecksumDigits + 1;
  if (entry.size() <= header || !entry.starts_with(kMagic)) return std::nullopt;
  const std::string_view checksum = entry.substr(kMagic.size(), kChecksumDigits), cubin = entry.substr(header);
  if (Sha256().Add(cubin).Finish() != checksum) return std::nullopt;
  return std::string(cubin);
}

std::string LoadOrCompile(const std::string& key, const std::string& glue, const std::string& arch, bool aligned,
                          std::string_view origin) {
  const Settings settings = GetSettings();
  const bool is_kept = !settings.cache_dir.empty();
  const std::string dir = settings.cache_dir + "/cuda", path = dir + "/" + key + ".cubin";
  if (is_kept) {
    if (const std::optional<std::string> entry = ReadFile(path)) {
      if (std::optional<std::string> cubin = CubinOf(*entry)) {
        ++Global().disk_hits;
        MarkUsed(path);
        return std::move(*cubin);
      }
      ++Global().broken_entries;
    }
  }
  Compiled compiled = Compile(glue, arch, aligned, origin);
  ++Global().compiled;
  // A folder that cannot be written costs a compile per process, not a call.
  if (is_kept && !ReplaceFile(path, EntryOf(compiled.cubin)).empty()) {
    ++Global().failed_writes;
  } else if (is_kept && settings.cache_bytes > 0) {
    Global().evicted += KeepNewest(dir, settings.cache_bytes);
  }
  return std::move(compiled.cubin);
}

// One per key that somebody is working on.
struct Turn {
  std::mutex mutex;
  std::optional<std::string> cubin;
};

struct Turns {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Turn>> by_key;
};

}  // namespace

CacheCounts GetCacheCounts() {
  const Counters& counters = Global();
  return {counters.compiled, counters.disk_hits, counters.broken_entries, counters.failed_writes, counters.evicted};
}

std::string CacheKey(const std::string& glue, const std::string& arch, bool aligned) {
  const Nvrtc& nvrtc = GetNvrtc();
  Sha256 key;
  key.AddField(std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor)).AddField(DeviceHeaders()->digest);
  for (const std::string& option : CompileOptions(arch, aligned)) key.AddField(option);
  return key.AddField(glue).Finish();
}

std::string GetCubin(const std::string& glue, const std::string& arch, bool aligned, std::string_view origin) {
  static Turns* turns = new Turns;
  const std::string key = CacheKey(glue, arch, aligned);
  std::shared_ptr<Turn> turn;
  {
    const std::lock_guard lock(turns->mutex);
    std::erase_if(turns->by_key, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<Turn>& shared = turns->by_key[key];
    turn = shared.lock();
    if (turn == nullptr) shared = turn = std::make_shared<Turn>();
  }
  const std::lock_guard lock(turn->mutex);
  if (!turn->cubin) turn->cubin = LoadOrCompile(key, glue, arch, aligned, origin);
  return *turn->cubin;
}

}  // namespace fkl::cuda
