#include "tensors.h"

namespace gapa {

void infer_leading_axes(const ort::Api* api, ort::ShapeInferContext* context, size_t outputs,
                        const std::vector<int64_t>& last) {
  ort::TensorInfo* first = nullptr;  // belongs to the context
  check(api, ort::ShapeInferContext_GetInputTypeShape(api, context, 0, &first));
  if (first == nullptr) return;
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, first, &rank));
  if (rank == 0) return;  // also what an unknown rank looks like
  std::vector<int64_t> dims(rank);
  std::vector<const char*> names(rank, "");
  check(api, ort::GetDimensions(api, first, dims.data(), rank));
  check(api, ort::GetSymbolicDimensions(api, first, names.data(), rank));
  for (size_t axis = 0; axis + 1 < rank; ++axis) {
    const bool named = names[axis] != nullptr && *names[axis] != '\0';
    if (!named) names[axis] = "";
    // Passed on, an unknown dimension without a name would become a literal -1.
    if (!named && dims[axis] < 0) return;
  }
  dims.pop_back();
  names.pop_back();
  dims.insert(dims.end(), last.begin(), last.end());
  names.resize(dims.size(), "");
  if (dims.empty()) return;

  ort::TensorInfo* raw = nullptr;
  check(api, ort::CreateTensorTypeAndShapeInfo(api, &raw));
  const TensorInfo held(api, raw);
  check(api, ort::SetTensorElementType(api, raw, ort::kFloat));
  check(api, ort::SetDimensions(api, raw, dims.data(), dims.size()));
  check(api, ort::SetSymbolicDimensions(api, raw, names.data(), names.size()));
  for (size_t i = 0; i < outputs; ++i) {
    check(api, ort::ShapeInferContext_SetOutputTypeShape(api, context, i, raw));
  }
}

}  // namespace gapa
