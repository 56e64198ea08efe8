#include <immintrin.h>

#include "simd/levels.h"

namespace gapa::simd {
namespace {
#include "simd/kernels.inc"
}  // namespace

const Kernels kAvx512 = table("avx512");

}  // namespace gapa::simd
