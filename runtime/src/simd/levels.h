// The tables that the build holds; dispatch.cc picks one.
#pragma once

#include "simd/kernels.h"

namespace gapa::simd {

extern const Kernels kGeneric;  ///< the architecture's baseline: SSE2, NEON, …
extern const Kernels kAvx2;     ///< x86-64 only, with FMA
extern const Kernels kAvx512;   ///< x86-64 only

}  // namespace gapa::simd
