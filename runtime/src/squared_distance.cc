// The float32 distance that FAISS calls, replaced at link time: Debian's adds one number after the
// other, and each addition waits for the last.
#include <cstddef>

#include "simd/kernels.h"

/// Called instead of faiss::fvec_L2sqr; see --wrap in CMakeLists.txt.
extern "C" float __wrap__ZN5faiss10fvec_L2sqrEPKfS1_m(const float* x, const float* y, size_t d) {
  return gapa::simd::kernels().rough_distance(x, y, static_cast<int64_t>(d));
}
