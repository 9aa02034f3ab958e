// Temporary memory of one call, cut from blocks that the process keeps.
#ifndef FKL_FFI_CPU_WORKSPACE_H_
#define FKL_FFI_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

namespace fkl {

// First reserve every part, then Allocate() once, then take the pointers. The memory holds garbage.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The place of `count` elements on cache lines of their own.
  template <class T>
  size_t Reserve(int64_t count) {
    const size_t offset = size_;
    size_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  void Allocate();  // throws std::bad_alloc
  template <class T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  static constexpr size_t kAlignment = 64;
  char* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace fkl

#endif  // FKL_FFI_CPU_WORKSPACE_H_
