// What the entry point needs to know of an operator, and what every operator starts from.
//
// gapa_onnx/op/contract.py is the contract, and the tests build their models from it.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "gapa/ort_abi.h"

namespace gapa {

inline constexpr const char* kDomain = "ai.gapa";
inline constexpr int kDomainVersion = 1;

/// A node that is ready to run. The call may come from many threads at once.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(ort::KernelContext* context) const = 0;

  const ort::Api* api() const { return api_; }
  const char* name() const { return name_; }

 protected:
  Kernel(const ort::Api* api, const char* name) : api_(api), name_(name) {}

  const ort::Api* api_;
  const char* name_;
};

struct Port {
  const char* name;
  ort::ElementType type;
};

/// An operator of the domain. Of its outputs the first is required.
struct OpSchema {
  const char* name;
  std::vector<Port> inputs, outputs;

  /// Checks the constant inputs; throws ModelError.
  std::unique_ptr<Kernel> (*create)(const ort::Api* api, const ort::KernelInfo* info,
                                    const OpSchema& schema);

  /// Called by onnxruntime while it loads a graph.
  void (*infer_shapes)(const ort::Api* api, ort::ShapeInferContext* context);

  /// No operator of the session uses more neighbours than this, whatever its file says.
  int64_t most_neighbours = std::numeric_limits<int64_t>::max();
};

}  // namespace gapa
