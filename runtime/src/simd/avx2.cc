#include <immintrin.h>

#include "simd/levels.h"

namespace gapa::simd {
namespace {
#include "simd/kernels.inc"
}  // namespace

const Kernels kAvx2 = table("avx2");

}  // namespace gapa::simd
