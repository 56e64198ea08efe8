// The operator for vocabularies: the largest elements of a long row.
#pragma once

#include "operator.h"

namespace gapa {

OpSchema leading_schema();

}  // namespace gapa
