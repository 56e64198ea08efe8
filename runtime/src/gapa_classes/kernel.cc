#include "gapa_classes/kernel.h"

#include <algorithm>
#include <limits>

#include "constants.h"
#include "gapa_classes/schema.h"
#include "tensors.h"

namespace gapa {
namespace {

enum ClassesInput : size_t { kMean, kVar, kOutput, kPoints, kAxis };
enum ClassesOutput : size_t { kProbs, kEntropy, kAleatoric, kEpistemic, kScore, kClassesOutputs };

// Exponentials in one task of a thread: some tens of microseconds.
constexpr int64_t kTaskSize = 1 << 15;

int64_t padded(int64_t points) {
  const int64_t lanes = simd::kernels().lanes;
  return (points + lanes - 1) / lanes * lanes;
}

int64_t product(const std::vector<int64_t>& shape, size_t begin, size_t end) {
  int64_t size = 1;
  for (size_t i = begin; i < end; ++i) size *= shape[i];
  return size;
}

}  // namespace

ClassesKernel::ClassesKernel(const ort::Api* api, const ort::KernelInfo* info,
                             const OpSchema& schema)
    : ClassesKernel(api, schema, ConstantReader(api, info, schema).finite(kPoints, 2),
                    ConstantReader(api, info, schema)
                        .integer(kAxis, 0, std::numeric_limits<int32_t>::max())) {}

ClassesKernel::ClassesKernel(const ort::Api* api, const OpSchema& schema,
                             const Tensor<float>& points, int64_t axis)
    : Kernel(api, schema.name),
      columns_(points.shape[1]),
      stride_(padded(points.shape[0])),
      points_(columns_ * stride_),
      weights_(stride_),
      axis_(axis) {
  const int64_t count = points.shape[0];
  for (int64_t s = 0; s < stride_; ++s) {
    weights_[s] = s < count ? 1.0 / count : 0;
    for (int64_t r = 0; r < columns_; ++r) {
      points_[r * stride_ + s] = s < count ? points.data[s * columns_ + r] : 0;
    }
  }
}

void ClassesKernel::compute(ort::KernelContext* context) const {
  const Input<float> mean = input<float>(api_, context, kMean, name(), "mean");
  const size_t rank = mean.shape.size(), axis = static_cast<size_t>(axis_);
  if (axis >= rank || mean.shape[axis] < 1) {
    throw ModelError(std::string(name()) + ": input 'mean' must have classes on axis " +
                     std::to_string(axis_) + ", but has shape " + shape_text(mean.shape) + ".");
  }
  const auto like_mean = [&](size_t which, const char* port) {
    const Input<float> found = input<float>(api_, context, which, name(), port);
    if (found.shape != mean.shape) {
      throw ModelError(std::string(name()) + ": input '" + port +
                       "' must have the shape of 'mean', " + shape_text(mean.shape) +
                       ", but has shape " + shape_text(found.shape) + ".");
    }
    return found.data;
  };
  const float* const var = like_mean(kVar, "var");
  const float* const predicted = like_mean(kOutput, "output");

  float* outputs[kClassesOutputs] = {output<float>(api_, context, kProbs, mean.shape)};
  std::vector<int64_t> shape = mean.shape;
  shape.erase(shape.begin() + axis_);
  for (size_t i = kEntropy; i < kClassesOutputs; ++i) {
    outputs[i] = output<float>(api_, context, i, shape);
  }
  const int64_t classes = mean.shape[axis], inner = product(mean.shape, axis + 1, rank);
  const int64_t rows = product(shape, 0, shape.size());
  if (rows == 0) return;

  // (outer, C, inner): a row is what has the same place but for its class.
  const simd::Kernels& kernels = simd::kernels();
  const simd::Noise noise = {points_.data(), weights_.data(), columns_, stride_};
  const auto moved = [](float* to, int64_t by) { return to ? to + by : nullptr; };
  const int64_t lanes = kernels.lanes;
  const int64_t block = std::max<int64_t>(1, kTaskSize / stride_ / classes / lanes) * lanes;
  parallel_for(api_, context, (rows + block - 1) / block, [&](size_t i) {
    AlignedArray<double> room(kernels.classes_room(classes));
    const int64_t begin = static_cast<int64_t>(i) * block, end = std::min(rows, begin + block);
    for (int64_t row = begin, count; row < end; row += count) {
      count = inner == 1 ? end - row : std::min(end - row, inner - row % inner);
      const int64_t at = row / inner * classes * inner + row % inner;
      const simd::Logits logits = {mean.data + at, var + at, predicted + at,
                                   classes,        inner,    inner == 1 ? classes : 1};
      kernels.classes(noise, logits, count, room.data(),
                      {moved(outputs[kProbs], at), moved(outputs[kEntropy], row),
                       moved(outputs[kAleatoric], row), moved(outputs[kEpistemic], row),
                       moved(outputs[kScore], row)});
    }
  });
}

OpSchema classes_schema() {
  return {"GapaClasses",
          {{"mean", ort::kFloat},
           {"var", ort::kFloat},
           {"output", ort::kFloat},
           {"points", ort::kFloat},
           {"axis", ort::kInt64}},
          {{"probs", ort::kFloat},
           {"entropy", ort::kFloat},
           {"aleatoric", ort::kFloat},
           {"epistemic", ort::kFloat},
           {"score", ort::kFloat}},
          [](const ort::Api* api, const ort::KernelInfo* info,
             const OpSchema& schema) -> std::unique_ptr<Kernel> {
            return std::make_unique<ClassesKernel>(api, info, schema);
          },
          // Which axis is missing from an output is not known yet: the axis is a tensor.
          [](const ort::Api*, ort::ShapeInferContext*) {}};
}

}  // namespace gapa
