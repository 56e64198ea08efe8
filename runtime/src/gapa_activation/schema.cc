#include "gapa_activation/schema.h"

#include "gapa_activation/kernel.h"
#include "tensors.h"

namespace gapa {
namespace {

template <IndexKind kind>
std::unique_ptr<Kernel> create(const ort::Api* api, const ort::KernelInfo* info,
                               const OpSchema& schema) {
  const ConstantReader reader(api, info, schema);
  // Codes are stored as they are: only points may come out of nodes of the graph.
  const bool may_unfold = kind != IndexKind::kIvfpq;
  for (size_t input = kK; input < schema.inputs.size(); ++input) {
    if (input != kFirstOfIndex || !may_unfold) reader.require(input);
  }
  if (may_unfold && reader.value(kFirstOfIndex) == nullptr) {
    return std::make_unique<UnfoldedKernel>(api, schema, kind);
  }
  return std::make_unique<ActivationKernel>(api, schema, read_parameters(reader, kind));
}

/// Only s: the last axis of the neighbours is the value of k, which is not known here.
void infer_shapes(const ort::Api* api, ort::ShapeInferContext* context) {
  infer_leading_axes(api, context, /*outputs=*/1, {1});
}

template <IndexKind kind>
OpSchema schema(const char* name, std::vector<Port> of_index) {
  std::vector<Port> inputs = {{"query", ort::kFloat},
                              {"k", ort::kInt64},
                              {"length_scale", ort::kFloat},
                              {"jitter", ort::kFloat}};
  inputs.insert(inputs.end(), of_index.begin(), of_index.end());
  return {name,
          std::move(inputs),
          {{"s", ort::kFloat}, {"neighbours", ort::kInt64}},
          create<kind>,
          infer_shapes};
}

}  // namespace

std::vector<OpSchema> activation_schemas() {
  const Port points = {"points", ort::kFloat}, centroids = {"centroids", ort::kFloat},
             list_offsets = {"list_offsets", ort::kInt64}, nprobe = {"nprobe", ort::kInt64},
             neighbourhoods = {"neighbourhoods", ort::kInt32};
  return {
      schema<IndexKind::kFlat>("GapaActivation", {points}),
      schema<IndexKind::kIvf>("GapaActivationIVF", {points, centroids, list_offsets, nprobe}),
      schema<IndexKind::kIvfpq>(
          "GapaActivationIVFPQ",
          {{"codes", ort::kUint8}, {"codebooks", ort::kFloat}, centroids, list_offsets, nprobe}),
      schema<IndexKind::kHnsw>("GapaActivationHNSW", {points,
                                                      {"levels", ort::kInt32},
                                                      {"links", ort::kInt32},
                                                      {"degree", ort::kInt64},
                                                      {"entry_point", ort::kInt64},
                                                      {"ef", ort::kInt64}}),
      schema<IndexKind::kLocal>("GapaActivationLocal",
                                {points, neighbourhoods, centroids, list_offsets, nprobe}),
      // What its portable body reads besides is not looked at: factors are computed here, in
      // float64.
      schema<IndexKind::kLocal>("GapaActivationPrepared", {points,
                                                           neighbourhoods,
                                                           centroids,
                                                           list_offsets,
                                                           nprobe,
                                                           {"list_of_row", ort::kInt32},
                                                           {"factors", ort::kFloat}}),
  };
}

}  // namespace gapa
