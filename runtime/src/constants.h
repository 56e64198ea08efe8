// The constant inputs of a node, read at session load and refused by name.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gapa/ort_abi.h"
#include "operator.h"
#include "status.h"
#include "tensors.h"

namespace gapa {

/// A constant tensor, row-major. The data belong to onnxruntime and outlive the kernel.
template <typename T>
struct Tensor {
  const T* data = nullptr;
  std::vector<int64_t> shape;
  int64_t size = 0;
};

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

template <typename T>
constexpr ort::ElementType element_type();
template <>
constexpr ort::ElementType element_type<float>() {
  return ort::kFloat;
}
template <>
constexpr ort::ElementType element_type<uint8_t>() {
  return ort::kUint8;
}
template <>
constexpr ort::ElementType element_type<int32_t>() {
  return ort::kInt32;
}
template <>
constexpr ort::ElementType element_type<int64_t>() {
  return ort::kInt64;
}

/// Reads the constant inputs of one node by position and refuses by name.
class ConstantReader {
 public:
  ConstantReader(const ort::Api* api, const ort::KernelInfo* info, const OpSchema& schema)
      : api_(api), info_(info), schema_(schema) {}

  /// Reads them from a run instead; what it returns is valid until that ends.
  ConstantReader(const ort::Api* api, const ort::KernelContext* context, const OpSchema& schema)
      : api_(api), context_(context), schema_(schema) {}

  const OpSchema& schema() const { return schema_; }

  [[noreturn]] void refuse(size_t input, const std::string& why) const {
    throw ModelError(std::string(schema_.name) + ": input '" + schema_.inputs[input].name + "' " +
                     why + ".");
  }

  /// nullptr for an input that is not constant.
  const ort::Value* value(size_t input) const {
    const ort::Value* value = nullptr;
    if (context_ != nullptr) {
      check(api_, ort::KernelContext_GetInput(api_, context_, input, &value));
      return value;
    }
    int is_constant = 0;
    check(api_, ort::KernelInfoGetConstantInput_tensor(api_, info_, input, &is_constant, &value));
    return is_constant ? value : nullptr;
  }

  const ort::Value* require(size_t input) const {
    const ort::Value* found = value(input);
    if (found == nullptr) {
      refuse(input, "must be a constant (an initializer that is not also a graph input)");
    }
    return found;
  }

  template <typename T>
  Tensor<T> tensor(size_t input) const {
    const ort::Value* value = require(input);
    const TensorInfo info = TensorInfo::of(api_, value);
    if (info.element_type() != element_type<T>()) refuse(input, "has the wrong element type");
    Tensor<T> tensor;
    tensor.shape = info.shape();
    tensor.size = 1;
    for (const int64_t dim : tensor.shape) tensor.size *= dim;
    tensor.data = data_of<const T>(api_, value);
    return tensor;
  }

  template <typename T>
  T scalar(size_t input) const {
    const Tensor<T> one = tensor<T>(input);
    if (one.size != 1 || one.shape.size() > 1) {
      refuse(input, "must hold one number, but has shape " + shape_text(one.shape));
    }
    return one.data[0];
  }

  int64_t integer(size_t input, int64_t low, int64_t high) const {
    const int64_t value = scalar<int64_t>(input);
    if (value < low || value > high) {
      refuse(input, "must be between " + std::to_string(low) + " and " + std::to_string(high) +
                        ", but is " + std::to_string(value));
    }
    return value;
  }

  double positive(size_t input) const {
    const float value = scalar<float>(input);
    if (!std::isfinite(value) || value <= 0) {
      refuse(input, "must be a positive finite number, but is " + std::to_string(value));
    }
    return value;
  }

  /// A tensor of the given rank without an empty axis.
  template <typename T>
  Tensor<T> filled(size_t input, size_t rank) const {
    Tensor<T> values = tensor<T>(input);
    if (values.shape.size() != rank || values.size < 1) {
      refuse(input, "must have rank " + std::to_string(rank) +
                        " and no empty axis, but has shape " + shape_text(values.shape));
    }
    return values;
  }

  /// The same, of numbers without a NaN or an infinity.
  Tensor<float> finite(size_t input, size_t rank) const {
    Tensor<float> values = filled<float>(input, rank);
    for (int64_t i = 0; i < values.size; ++i) {
      if (!std::isfinite(values.data[i])) {
        refuse(input, "holds a NaN or an infinity at element " + std::to_string(i));
      }
    }
    return values;
  }

 private:
  const ort::Api* api_;
  const ort::KernelInfo* info_ = nullptr;
  const ort::KernelContext* context_ = nullptr;
  const OpSchema& schema_;
};

}  // namespace gapa
