#include "gapa_split/kernel.h"

#include <algorithm>

#include "constants.h"
#include "gapa_split/schema.h"
#include "tensors.h"

namespace gapa {
namespace {

enum SplitInput : size_t { kMean, kVar, kPoints };
enum SplitOutput : size_t { kEntropy, kAleatoric, kEpistemic, kSplitOutputs };

// Exponentials in one task of a thread: some tens of microseconds.
constexpr int64_t kTaskSize = 1 << 15;

int64_t padded(int64_t points) {
  const int64_t lanes = simd::kernels().lanes;
  return (points + lanes - 1) / lanes * lanes;
}

}  // namespace

SplitKernel::SplitKernel(const ort::Api* api, const ort::KernelInfo* info, const OpSchema& schema)
    : SplitKernel(api, schema, ConstantReader(api, info, schema).finite(kPoints, 2)) {}

SplitKernel::SplitKernel(const ort::Api* api, const OpSchema& schema, const Tensor<float>& points)
    : Kernel(api, schema.name),
      columns_(points.shape[1]),
      stride_(padded(points.shape[0])),
      points_(columns_ * stride_),
      weights_(stride_) {
  const int64_t count = points.shape[0];
  for (int64_t s = 0; s < stride_; ++s) {
    weights_[s] = s < count ? 1.0 / count : 0;
    for (int64_t r = 0; r < columns_; ++r) {
      points_[r * stride_ + s] = s < count ? points.data[s * columns_ + r] : 0;
    }
  }
}

void SplitKernel::compute(ort::KernelContext* context) const {
  const Input<float> mean = input<float>(api_, context, kMean, name(), "mean");
  const Input<float> var = input<float>(api_, context, kVar, name(), "var");
  if (mean.shape.empty() || mean.shape.back() < 1) {
    throw ModelError(std::string(name()) + ": input 'mean' must have classes on its last axis, " +
                     "but has shape " + shape_text(mean.shape) + ".");
  }
  if (var.shape != mean.shape) {
    throw ModelError(std::string(name()) + ": input 'var' must have the shape of 'mean', " +
                     shape_text(mean.shape) + ", but has shape " + shape_text(var.shape) + ".");
  }
  const int64_t classes = mean.shape.back();
  const std::vector<int64_t> shape(mean.shape.begin(), mean.shape.end() - 1);
  float* outputs[kSplitOutputs];
  for (size_t i = 0; i < kSplitOutputs; ++i) outputs[i] = output<float>(api_, context, i, shape);
  int64_t rows = 1;
  for (const int64_t size : shape) rows *= size;
  if (rows == 0) return;

  const simd::Kernels& kernels = simd::kernels();
  const simd::Noise noise = {points_.data(), weights_.data(), columns_, stride_};
  const int64_t block = std::max<int64_t>(1, kTaskSize / stride_ / classes);
  parallel_for(api_, context, (rows + block - 1) / block, [&](size_t i) {
    AlignedArray<double> room(kernels.split_room(classes));
    const int64_t begin = static_cast<int64_t>(i) * block, end = std::min(rows, begin + block);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * classes;
      const simd::Entropies found =
          kernels.split(noise, mean.data + at, var.data + at, classes, room.data());
      if (outputs[kEntropy]) outputs[kEntropy][row] = static_cast<float>(found.total);
      if (outputs[kAleatoric]) outputs[kAleatoric][row] = static_cast<float>(found.aleatoric);
      if (outputs[kEpistemic]) outputs[kEpistemic][row] = static_cast<float>(found.epistemic);
    }
  });
}

OpSchema split_schema() {
  return {"GapaSplit",
          {{"mean", ort::kFloat}, {"var", ort::kFloat}, {"points", ort::kFloat}},
          {{"entropy", ort::kFloat}, {"aleatoric", ort::kFloat}, {"epistemic", ort::kFloat}},
          [](const ort::Api* api, const ort::KernelInfo* info,
             const OpSchema& schema) -> std::unique_ptr<Kernel> {
            return std::make_unique<SplitKernel>(api, info, schema);
          },
          [](const ort::Api* api, ort::ShapeInferContext* context) {
            infer_leading_axes(api, context, kSplitOutputs, {});
          }};
}

}  // namespace gapa
