#include "cuda/loaded_kernels.h"

#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "cuda/cache.h"
#include "cuda/compile.h"

namespace fkl::cuda {
namespace {

uint64_t Mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xd6e8feb86659fd93u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Of a few thousand characters before every execution, so it must be fast; equality is checked in
// full.
uint64_t HashOf(std::string_view text) {
  uint64_t lanes[2] = {text.size(), 1};
  size_t at = 0;
  for (; at + 32 <= text.size(); at += 32) {
    uint64_t words[4];
    std::memcpy(words, text.data() + at, 32);
    lanes[0] = Mix(lanes[0] ^ words[0], words[1]);
    lanes[1] = Mix(lanes[1] ^ words[2], words[3]);
  }
  uint64_t rest[4] = {};
  std::memcpy(rest, text.data() + at, text.size() - at);
  return Mix(Mix(lanes[0] ^ rest[0], lanes[1] ^ rest[1]), Mix(rest[2], rest[3]));
}

struct Key {
  std::string_view glue, names;
  bool aligned;
  int device;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return Mix(HashOf(key.glue), static_cast<uint64_t>(key.device) * 2 + key.aligned);
  }
};

struct Entry {
  std::string glue, names;  // what the key looks at
  std::mutex mutex;         // held by the thread that loads
  bool is_loaded = false;   // guarded by the mutex
  LoadedKernels kernels;
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<Key, std::unique_ptr<Entry>, KeyHash> entries;  // all that anybody asked for
  std::unordered_map<Key, const LoadedKernels*, KeyHash> loaded;
};

// Never destroyed: handlers may still run while the process ends.
Table& Global() {
  static Table* table = new Table;
  return *table;
}

Entry& EntryOf(const Key& key) {
  Table& table = Global();
  const std::unique_lock lock(table.mutex);
  const auto found = table.entries.find(key);
  if (found != table.entries.end()) return *found->second;
  auto entry = std::make_unique<Entry>();
  entry->glue = key.glue;
  entry->names = key.names;
  const Key own = {entry->glue, entry->names, key.aligned, key.device};
  return *table.entries.emplace(own, std::move(entry)).first->second;
}

// A late load may happen while another thread, or this one, captures a graph; the driver would
// refuse it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kCaptureRelaxed;
};

void CheckSharedBytes(const KernelRequest& request, const DeviceInfo& info) {
  for (const int bytes : request.shared_bytes) {
    if (bytes <= info.max_shared_bytes) continue;
    throw CudaError("a kernel of this call needs " + std::to_string(bytes) + " bytes of shared memory per block, " +
                    info.name + " has " + std::to_string(info.max_shared_bytes) +
                    "; the program was made for another GPU: trace or export it again on this one");
  }
}

LoadedKernels Load(const KernelRequest& request) {
  const Driver& driver = GetDriver();
  const DeviceInfo& info = GetDeviceInfo(request.device);
  CheckSharedBytes(request, info);
  const std::string cubin = GetCubin(std::string(request.glue), ArchName(info.arch), request.aligned, request.origin);
  const RelaxedCapture relaxed(driver);
  Module module = nullptr;
  driver.Check(driver.cuModuleLoadData(&module, cubin.data()), "cuModuleLoadData");
  LoadedKernels kernels;
  std::string_view names = request.names;
  try {
    for (const int shared_bytes : request.shared_bytes) {
      const size_t blank = names.find(' ');
      const std::string name(names.substr(0, blank));
      names = blank == std::string_view::npos ? std::string_view() : names.substr(blank + 1);
      Function function = nullptr;
      driver.Check(driver.cuModuleGetFunction(&function, module, name.c_str()), "cuModuleGetFunction(" + name + ")");
      driver.Check(driver.cuFuncSetAttribute(function, kMaxDynamicSharedSizeBytes, shared_bytes),
                   "cuFuncSetAttribute(" + name + ", " + std::to_string(shared_bytes) + " bytes of shared memory)");
      kernels.functions.push_back(function);
    }
    if (!names.empty()) throw CudaError("cuda_kernels names more kernels than cuda_launch describes");
  } catch (...) {
    driver.cuModuleUnload(module);
    throw;
  }
  return kernels;
}

}  // namespace

const LoadedKernels& GetKernels(const KernelRequest& request) {
  Table& table = Global();
  const Key key = {request.glue, request.names, request.aligned, request.device};
  {
    const std::shared_lock lock(table.mutex);
    const auto found = table.loaded.find(key);
    if (found != table.loaded.end()) return *found->second;
  }
  Entry& entry = EntryOf(key);
  const std::lock_guard lock(entry.mutex);
  if (!entry.is_loaded) {
    entry.kernels = Load(request);
    entry.is_loaded = true;
    const Key own = {entry.glue, entry.names, key.aligned, key.device};
    const std::unique_lock table_lock(table.mutex);
    table.loaded.emplace(own, &entry.kernels);
  }
  return entry.kernels;
}

int64_t NumLoadedKernels() {
  Table& table = Global();
  const std::shared_lock lock(table.mutex);
  return static_cast<int64_t>(table.loaded.size());
}

}  // namespace fkl::cuda
