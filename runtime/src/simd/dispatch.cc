#include <cstdlib>
#include <cstring>

#if defined(GAPA_X86_LEVELS)
#include <cpuid.h>
#endif

#include "simd/levels.h"

namespace gapa::simd {
namespace {

#if defined(GAPA_X86_LEVELS)
struct Features {
  bool avx2, avx512;
};

/// What this CPU has, and its operating system saves when threads change. The instruction itself is
/// asked: what compilers offer for it needs their own runtime library, which not every linker puts
/// into a library.
Features features() {
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // registers that the system saves, as bits of XCR0
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return {};
  unsigned saved = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if ((saved & kYmm) != kYmm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  const unsigned wide = bit_AVX512F | bit_AVX512DQ | bit_AVX512VL;
  const bool avx2 = b & bit_AVX2;
  return {avx2, avx2 && (saved & kZmm) == kZmm && (b & wide) == wide};
}
#endif

/// The most capable table that this CPU and its operating system can run, up to the one named.
const Kernels& choose(const char* highest) {
#if defined(GAPA_X86_LEVELS)
  const auto held_to = [highest](const char* name) {
    return highest != nullptr && std::strcmp(highest, name) == 0;
  };
  if (held_to("generic")) return kGeneric;
  const Features known = features();
  if (known.avx512 && !held_to("avx2")) return kAvx512;
  if (known.avx2) return kAvx2;
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
