// The operator for heads: how much of an uncertain softmax lies in the data, how much in the model.
#pragma once

#include "operator.h"

namespace gapa {

OpSchema split_schema();

}  // namespace gapa
