// The operators of the domain ai.gapa as onnxruntime must see them; gapa_onnx/op/contract.py is the
// contract, and the tests build their models from it.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "gapa/ort_abi.h"

namespace gapa {

inline constexpr const char* kDomain = "ai.gapa";
inline constexpr int kDomainVersion = 1;

enum class IndexKind { kFlat, kIvf, kIvfpq, kHnsw };

struct Port {
  const char* name;
  ort::ElementType type;
};

struct OpSchema {
  const char* name;
  IndexKind kind;
  std::vector<Port> inputs;
};

/// The inputs that every operator starts with; the others follow per kind, in parameters.cc too.
enum CommonInput : size_t { kQuery, kK, kLengthScale, kJitter, kFirstOfIndex };

enum Output : size_t { kS, kNeighbours, kOutputCount };
inline constexpr std::array<ort::ElementType, kOutputCount> kOutputTypes = {ort::kFloat,
                                                                            ort::kInt64};

/// The four operators, in the order in which they are registered.
inline const std::array<OpSchema, 4>& schemas() {
  static const std::array<OpSchema, 4> all = {{
      {"GapaActivation",
       IndexKind::kFlat,
       {{"query", ort::kFloat},
        {"k", ort::kInt64},
        {"length_scale", ort::kFloat},
        {"jitter", ort::kFloat},
        {"points", ort::kFloat}}},
      {"GapaActivationIVF",
       IndexKind::kIvf,
       {{"query", ort::kFloat},
        {"k", ort::kInt64},
        {"length_scale", ort::kFloat},
        {"jitter", ort::kFloat},
        {"points", ort::kFloat},
        {"centroids", ort::kFloat},
        {"list_offsets", ort::kInt64},
        {"nprobe", ort::kInt64}}},
      {"GapaActivationIVFPQ",
       IndexKind::kIvfpq,
       {{"query", ort::kFloat},
        {"k", ort::kInt64},
        {"length_scale", ort::kFloat},
        {"jitter", ort::kFloat},
        {"codes", ort::kUint8},
        {"codebooks", ort::kFloat},
        {"centroids", ort::kFloat},
        {"list_offsets", ort::kInt64},
        {"nprobe", ort::kInt64}}},
      {"GapaActivationHNSW",
       IndexKind::kHnsw,
       {{"query", ort::kFloat},
        {"k", ort::kInt64},
        {"length_scale", ort::kFloat},
        {"jitter", ort::kFloat},
        {"points", ort::kFloat},
        {"levels", ort::kInt32},
        {"links", ort::kInt32},
        {"degree", ort::kInt64},
        {"entry_point", ort::kInt64},
        {"ef", ort::kInt64}}},
  }};
  return all;
}

}  // namespace gapa
