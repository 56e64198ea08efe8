// The operators for s, one per kind of index.
#pragma once

#include <vector>

#include "operator.h"

namespace gapa {

enum Output : size_t { kS, kNeighbours };

std::vector<OpSchema> activation_schemas();

}  // namespace gapa
