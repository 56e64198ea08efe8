#include "simd/levels.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gapa::simd {
namespace {
#include "simd/kernels.inc"
}  // namespace

const Kernels kGeneric = table("generic");

}  // namespace gapa::simd
