// The float32 distance that FAISS calls, replaced: its own adds one number after the other, and
// each addition waits for the last.
#include <cstddef>

#include "simd/kernels.h"

#if defined(GAPA_FAISS_FROM_SOURCE)
namespace faiss {
/// Its own is compiled by another name; see cmake/faiss.cmake.
float fvec_L2sqr(const float* x, const float* y, size_t d) {
  return gapa::simd::kernels().rough_distance(x, y, static_cast<int64_t>(d));
}
}  // namespace faiss
#else
/// Called instead of faiss::fvec_L2sqr; see --wrap in CMakeLists.txt.
extern "C" float __wrap__ZN5faiss10fvec_L2sqrEPKfS1_m(const float* x, const float* y, size_t d) {
  return gapa::simd::kernels().rough_distance(x, y, static_cast<int64_t>(d));
}
#endif
