#include "simd/levels.h"
#include <immintrin.h>

namespace gapa::simd {
namespace {
#include "simd/kernels.inc"
}  // namespace

const Kernels kAvx2 = table("avx2");

}  // namespace gapa::simd
