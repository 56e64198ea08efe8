#pragma once

#include <cstdint>

#include "operator.h"

namespace gapa {

/// GapaLeading. The answer to a row depends on that row alone.
class LeadingKernel : public Kernel {
 public:
  /// Throws ModelError if k is missing or corrupt.
  LeadingKernel(const ort::Api* api, const ort::KernelInfo* info, const OpSchema& schema);

  void compute(ort::KernelContext* context) const override;

 private:
  int64_t k_;
};

}  // namespace gapa
