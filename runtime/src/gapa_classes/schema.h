// The operator for heads: probabilities of uncertain logits, and where uncertainty comes from.
#pragma once

#include "operator.h"

namespace gapa {

OpSchema classes_schema();

}  // namespace gapa
