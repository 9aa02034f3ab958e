#include "cuda/settings.h"

#include <mutex>
#include <utility>

namespace fkl::cuda {
namespace {

struct Guarded {
  std::mutex mutex;
  Settings settings;
};

Guarded& Global() {
  static Guarded guarded;
  return guarded;
}

}  // namespace

void SetSettings(Settings settings) {
  Guarded& global = Global();
  const std::lock_guard lock(global.mutex);
  global.settings = std::move(settings);
}

Settings GetSettings() {
  Guarded& global = Global();
  const std::lock_guard lock(global.mutex);
  return global.settings;
}

}  // namespace fkl::cuda
