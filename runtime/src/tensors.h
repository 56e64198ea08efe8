// Tensors of a running graph, its shapes and its threads.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "gapa/ort_abi.h"
#include "status.h"

namespace gapa {

/// Owns what describes a tensor.
class TensorInfo {
 public:
  TensorInfo(const ort::Api* api, ort::TensorInfo* raw) : api_(api), raw_(raw) {}
  TensorInfo(const TensorInfo&) = delete;
  TensorInfo& operator=(const TensorInfo&) = delete;
  ~TensorInfo() { ort::ReleaseTensorTypeAndShapeInfo(api_, raw_); }

  static TensorInfo of(const ort::Api* api, const ort::Value* value) {
    ort::TensorInfo* raw = nullptr;
    check(api, ort::GetTensorTypeAndShape(api, value, &raw));
    return {api, raw};
  }

  int element_type() const {
    int type = 0;
    check(api_, ort::GetTensorElementType(api_, raw_, &type));
    return type;
  }

  std::vector<int64_t> shape() const {
    size_t rank = 0;
    check(api_, ort::GetDimensionsCount(api_, raw_, &rank));
    std::vector<int64_t> shape(rank);
    check(api_, ort::GetDimensions(api_, raw_, shape.data(), rank));
    return shape;
  }

  ort::TensorInfo* raw() const { return raw_; }

 private:
  const ort::Api* api_;
  ort::TensorInfo* raw_;
};

template <typename T>
T* data_of(const ort::Api* api, const ort::Value* value) {
  void* data = nullptr;
  check(api, ort::GetTensorMutableData(api, const_cast<ort::Value*>(value), &data));
  return static_cast<T*>(data);
}

/// An input of the running node. The type is the one that the operator declares.
template <typename T>
struct Input {
  const T* data;
  std::vector<int64_t> shape;
};

template <typename T>
Input<T> input(const ort::Api* api, ort::KernelContext* context, size_t which, const char* op_name,
               const char* name) {
  const ort::Value* value = nullptr;
  check(api, ort::KernelContext_GetInput(api, context, which, &value));
  if (value == nullptr) {
    throw ModelError(std::string(op_name) + ": input '" + name + "' is missing.");
  }
  return {data_of<const T>(api, value), TensorInfo::of(api, value).shape()};
}

/// nullptr for an output that the graph does not use.
template <typename T>
T* output(const ort::Api* api, ort::KernelContext* context, size_t which,
          const std::vector<int64_t>& shape) {
  size_t count = 0;
  check(api, ort::KernelContext_GetOutputCount(api, context, &count));
  if (which >= count) return nullptr;
  ort::Value* value = nullptr;
  check(api, ort::KernelContext_GetOutput(api, context, which, shape.data(), shape.size(), &value));
  return value == nullptr ? nullptr : data_of<T>(api, value);
}

/// Runs task(i) for every i < count on the session's threads; rethrows the first exception here.
template <typename Task>
void parallel_for(const ort::Api* api, ort::KernelContext* context, size_t count,
                  const Task& task) {
  struct Job {
    const Task& task;
    std::mutex mutex;
    std::exception_ptr error;
  } job{task, {}, nullptr};
  const auto run = [](void* data, size_t i) {
    Job& job = *static_cast<Job*>(data);
    try {
      job.task(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(job.mutex);
      if (!job.error) job.error = std::current_exception();
    }
  };
  if (count == 1) {
    run(&job, 0);
  } else {
    check(api, ort::KernelContext_ParallelFor(api, context, run, count, 0, &job));
  }
  if (job.error) std::rethrow_exception(job.error);
}

/// Gives the first `outputs` outputs, all float, the leading axes of input 0 and the `last` ones.
/// Does nothing where these axes are not known.
void infer_leading_axes(const ort::Api* api, ort::ShapeInferContext* context, size_t outputs,
                        const std::vector<int64_t>& last);

}  // namespace gapa
