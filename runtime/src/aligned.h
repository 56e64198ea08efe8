// Arrays on cache-line boundaries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace gapa {

/// An array of numbers, not set, that starts on a cache line: a vector of the widest registers then
/// never straddles two.
template <typename T>
class AlignedArray {
 public:
  explicit AlignedArray(int64_t size)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{kCacheLine}))) {}

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_.get()[i]; }
  const T& operator[](int64_t i) const { return data_.get()[i]; }

 private:
  static constexpr size_t kCacheLine = 64;
  struct Free {
    void operator()(T* data) const { ::operator delete(data, std::align_val_t{kCacheLine}); }
  };
  std::unique_ptr<T[], Free> data_;
};

}  // namespace gapa
