// The float32 distance that every FAISS index spends its time in, replaced at link time.
//
// Debian's FAISS adds one number after the other, and each addition waits for the last. Sixteen
// independent sums let the compiler use the vector registers of any CPU; the rounding error is
// smaller too.
#include <cstddef>

namespace {
constexpr size_t kLanes = 16;
}

/// Called instead of faiss::fvec_L2sqr; see --wrap in CMakeLists.txt.
extern "C" float __wrap__ZN5faiss10fvec_L2sqrEPKfS1_m(const float* x, const float* y, size_t d) {
  float sums[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float difference = x[i + lane] - y[i + lane];
      sums[lane] += difference * difference;
    }
  }
  for (size_t lane = 0; i < d; ++i, ++lane) {
    const float difference = x[i] - y[i];
    sums[lane] += difference * difference;
  }
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}
