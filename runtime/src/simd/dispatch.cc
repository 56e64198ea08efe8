#include <cstdlib>
#include <cstring>

#include "simd/levels.h"

namespace gapa::simd {
namespace {

/// The most capable table that this CPU and its operating system can run, up to the one named.
const Kernels& choose(const char* highest) {
#if defined(GAPA_X86_LEVELS)
  const auto held_to = [highest](const char* name) {
    return highest != nullptr && std::strcmp(highest, name) == 0;
  };
  if (held_to("generic")) return kGeneric;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && !held_to("avx2")) return kAvx512;
  if (avx2) return kAvx2;
#endif
  (void)highest;
  return kGeneric;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose(std::getenv("GAPA_ONNX_ISA"));
  return chosen;
}

}  // namespace gapa::simd
