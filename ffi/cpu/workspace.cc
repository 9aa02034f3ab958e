#include "cpu/workspace.h"

#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

namespace fkl {
namespace {

// Fresh pages cost more than a small attention: first touch of 16 MB takes 9 ms, or 1.3 ms in huge
// pages. So a bounded amount is kept between calls.
constexpr size_t kKeptBytes = size_t{64} << 20;
constexpr size_t kSmallBlock = size_t{256} << 10;
constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  char* data;
  size_t capacity;
};

class FreeList {
 public:
  // The smallest kept block of at least `bytes`, else a new one. However large it is: its pages are
  // there already, while a new block beside it might have to drop it.
  Block Take(size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      size_t best = blocks_.size();
      for (size_t i = 0; i < blocks_.size(); ++i) {
        const size_t capacity = blocks_[i].capacity;
        if (capacity < bytes) continue;
        if (best == blocks_.size() || capacity < blocks_[best].capacity) best = i;
      }
      if (best < blocks_.size()) {
        const Block block = blocks_[best];
        blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(best));
        kept_ -= block.capacity;
        return block;
      }
      // What is kept did not serve; before the process grows, give it back.
      while (!blocks_.empty() && kept_ + bytes > kKeptBytes) DropOldest();
    }
    const size_t unit = bytes <= kSmallBlock ? kSmallBlock : kHugePage;
    const size_t capacity = (bytes + unit - 1) / unit * unit;
    void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    if (capacity >= kHugePage) madvise(data, capacity, MADV_HUGEPAGE);  // a hint: failure is harmless
    return {static_cast<char*>(data), capacity};
  }

  void Give(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (block.capacity > kKeptBytes) {
      munmap(block.data, block.capacity);
      return;
    }
    while (!blocks_.empty() && kept_ + block.capacity > kKeptBytes) DropOldest();
    blocks_.push_back(block);
    kept_ += block.capacity;
  }

 private:
  void DropOldest() {
    munmap(blocks_.front().data, blocks_.front().capacity);
    kept_ -= blocks_.front().capacity;
    blocks_.erase(blocks_.begin());
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;
  size_t kept_ = 0;
};

// Never destroyed: a pool thread may still give a block back while the process exits.
FreeList& Blocks() {
  static FreeList* blocks = new FreeList;
  return *blocks;
}

}  // namespace

void Workspace::Allocate() {
  if (size_ == 0) return;
  const Block block = Blocks().Take(size_);
  data_ = block.data;
  capacity_ = block.capacity;
}

Workspace::~Workspace() {
  if (data_ != nullptr) Blocks().Give({data_, capacity_});
}

}  // namespace fkl
