#pragma once

#include <cstdint>
#include <vector>

#include "aligned.h"
#include "constants.h"
#include "operator.h"
#include "simd/kernels.h"

namespace gapa {

/// GapaClasses. The answer to a row depends on that row and the points alone, bit for bit.
class ClassesKernel : public Kernel {
 public:
  /// Throws ModelError if the points or the axis are missing or corrupt.
  ClassesKernel(const ort::Api* api, const ort::KernelInfo* info, const OpSchema& schema);

  void compute(ort::KernelContext* context) const override;

 private:
  ClassesKernel(const ort::Api* api, const OpSchema& schema, const Tensor<float>& points,
                int64_t axis);

  int64_t columns_, stride_;
  AlignedArray<double> points_;  ///< (R, stride): the contract's points, turned
  std::vector<double> weights_;  ///< (stride): 1/S for each point
  int64_t axis_;
};

}  // namespace gapa
