// Memory to work in that a thread keeps from one call to the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace gapa {

/// Blocks that this thread has no use for at the moment. Given back to the system they would come
/// back as pages to be cleared, which takes longer than what one query is worth.
class ScratchBlocks {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  static ScratchBlocks& of_this_thread() {
    static thread_local ScratchBlocks blocks;
    return blocks;
  }

  Block take(size_t bytes) {
    size_t best = spare_.size();
    for (size_t i = 0; i < spare_.size(); ++i) {
      const bool fits = spare_[i].bytes >= bytes && spare_[i].bytes / 4 <= bytes;
      if (fits && (best == spare_.size() || spare_[i].bytes < spare_[best].bytes)) best = i;
    }
    if (best == spare_.size()) {
      const size_t rounded = (bytes + kStep) / kStep * kStep;
      return {::operator new(rounded, std::align_val_t{kCacheLine}), rounded};
    }
    std::swap(spare_[best], spare_.back());
    const Block block = spare_.back();
    spare_.pop_back();
    return block;
  }

  void give(Block block) noexcept {
    if (spare_.size() == kMostBlocks || block.bytes > kMostBytes) return release(block);
    spare_.push_back(block);
  }

 private:
  static constexpr size_t kCacheLine = 64, kStep = 1024;
  static constexpr size_t kMostBlocks = 16, kMostBytes = size_t{1} << 20;

  ScratchBlocks() { spare_.reserve(kMostBlocks); }
  ~ScratchBlocks() {
    for (const Block& block : spare_) release(block);
  }
  static void release(Block block) noexcept {
    ::operator delete(block.data, std::align_val_t{kCacheLine});
  }

  std::vector<Block> spare_;
};

/// An array of numbers, not set, on a cache line. Made and gone within one call, on one thread.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size) : block_(ScratchBlocks::of_this_thread().take(size * sizeof(T))) {}
  ~Scratch() { ScratchBlocks::of_this_thread().give(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() { return static_cast<T*>(block_.data); }
  const T* data() const { return static_cast<const T*>(block_.data); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }

 private:
  ScratchBlocks::Block block_;
};

}  // namespace gapa
