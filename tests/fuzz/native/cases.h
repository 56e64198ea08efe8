// Cases: a node of an operator with its tensors, mostly right, some with something wrong with them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "random.h"
#include "stand_in.h"

namespace gapa::fuzz {

inline constexpr const char* kOperators[] = {
    "GapaActivation",      "GapaActivationIVF",      "GapaActivationIVFPQ", "GapaActivationHNSW",
    "GapaActivationLocal", "GapaActivationPrepared", "GapaClasses",         "GapaLeading"};
inline constexpr size_t kOperatorCount = 8;
enum Operator : size_t { kFlat, kIvf, kIvfpq, kHnsw, kLocal, kPrepared, kClasses, kLeading };

struct Operand {
  ort::Value value;
  bool constant = false;
  bool missing = false;
};

struct Case {
  size_t op = 0;
  std::vector<Operand> inputs;  ///< in the order of the contract
  std::optional<std::string> most_neighbours;
  std::string version = "1.20.1";
  size_t output_count = 0;
  uint32_t wanted = ~0u;
  size_t misaligned = 0;
  int pool = 1;
  int failing_call = -1, failing_allocation = -1;
  ort::TensorInfo declared;  ///< what the graph says of input 0; empty: nothing
  bool sound = true;         ///< nothing is wrong with it: it must be computed
  std::string damage;        ///< what was done to it, for whoever looks for a failure
};

/// The operator is drawn too, unless one is named.
Case make_case(Random& random, std::optional<size_t> op = std::nullopt);

}  // namespace gapa::fuzz
