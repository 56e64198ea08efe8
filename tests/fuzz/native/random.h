// Where a case takes its decisions from: a 64-bit seed, or the bytes of a coverage-guided fuzzer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gapa::fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  Random(const uint8_t* bytes, size_t count) : bytes_(bytes), left_(count) {}

  uint64_t bits() {
    if (bytes_ == nullptr) {  // splitmix64
      uint64_t z = state_ += 0x9e3779b97f4a7c15u;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      z = (z ^ z >> 27) * 0x94d049bb133111ebu;
      return z ^ z >> 31;
    }
    // Two bytes of the input a decision: small changes of the input are small changes of the case.
    // Behind the end there are decisions all the same, so that short inputs are whole cases.
    if (left_ < 2) {
      uint64_t z = state_ += 0x9e3779b97f4a7c15u;
      z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
      return z ^ z >> 31;
    }
    uint16_t taken;
    std::memcpy(&taken, bytes_, sizeof taken);
    bytes_ += 2;
    left_ -= 2;
    state_ += taken;
    return static_cast<uint64_t>(taken) << 48 | static_cast<uint64_t>(taken) << 24 | taken;
  }

  /// 0 … n-1
  int64_t below(int64_t n) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(bits()) * n >> 64);
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool once_in(int64_t n) { return below(n) == 0; }
  /// -1 … 1
  float unit() { return static_cast<float>(static_cast<double>(bits() >> 11) * 0x1p-52 - 1); }
  template <typename T, size_t n>
  T one_of(const T (&values)[n]) {
    return values[below(n)];
  }

 private:
  uint64_t state_ = 0;
  const uint8_t* bytes_ = nullptr;
  size_t left_ = 0;
};

}  // namespace gapa::fuzz
