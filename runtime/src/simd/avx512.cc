#include "simd/levels.h"
#include <immintrin.h>

namespace gapa::simd {
namespace {
#include "simd/kernels.inc"
}  // namespace

const Kernels kAvx512 = table("avx512");

}  // namespace gapa::simd
