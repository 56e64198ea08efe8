// Runs a case through the library and holds what comes out against what is promised.
#pragma once

#include <string>

#include "cases.h"

namespace gapa::fuzz {

enum class Outcome { kRefusedAtRegistration, kRefusedAtLoad, kRefusedAtRun, kComputed };
inline constexpr const char* kOutcomes[] = {"refused at registration", "refused at load",
                                            "refused at run", "computed"};

struct Answer {
  Outcome outcome;
  std::string message;  ///< of a refusal
};

/// With `threads`, as many run the same node at once, and each must say what one alone says.
/// Ends the process where a promise is broken.
Answer check(const Case& one, int threads = 0);

}  // namespace gapa::fuzz
