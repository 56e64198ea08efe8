// The same cases for libFuzzer and whatever speaks its interface: bytes take the decisions.
#include <cstddef>
#include <cstdint>

#include "cases.h"
#include "check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
  gapa::fuzz::Random random(bytes, count);
  gapa::fuzz::check(gapa::fuzz::make_case(random));
  return 0;
}
