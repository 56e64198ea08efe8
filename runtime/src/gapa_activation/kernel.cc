#include "gapa_activation/kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gapa_activation/solve.h"
#include "status.h"

namespace gapa {
namespace {

// A small batch is shared out over this many tasks of the thread pool; in a large one a task takes
// enough queries for its workspace to pay off.
constexpr int64_t kFewestTasks = 8;
constexpr int64_t kLargestChunk = 32;

template <typename T>
T* data_of(const ort::Api* api, const ort::Value* value) {
  void* data = nullptr;
  check(api, ort::GetTensorMutableData(api, const_cast<ort::Value*>(value), &data));
  return static_cast<T*>(data);
}

std::vector<int64_t> shape_of(const ort::Api* api, const ort::Value* value) {
  ort::TensorInfo* raw = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &raw));
  const auto release = [api](ort::TensorInfo* p) { ort::ReleaseTensorTypeAndShapeInfo(api, p); };
  const std::unique_ptr<ort::TensorInfo, decltype(release)> held(raw, release);
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, raw, &rank));
  std::vector<int64_t> shape(rank);
  check(api, ort::GetDimensions(api, raw, shape.data(), rank));
  return shape;
}

/// nullptr for an output that the graph does not use.
template <typename T>
T* output(const ort::Api* api, ort::KernelContext* context, Output which,
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

}  // namespace

Kernel::Kernel(const ort::Api* api, const ort::KernelInfo* info, const OpSchema& schema)
    : Kernel(api, schema, read_parameters(api, info, schema)) {}

Kernel::Kernel(const ort::Api* api, const OpSchema& schema, const Parameters& parameters)
    : api_(api),
      schema_(schema),
      k_(parameters.k),
      dim_(parameters.dim),
      length_scale_(parameters.length_scale),
      jitter_(parameters.jitter),
      index_(make_index(parameters)) {}

void Kernel::compute(ort::KernelContext* context) const {
  const ort::Value* query = nullptr;
  check(api_, ort::KernelContext_GetInput(api_, context, kQuery, &query));
  if (query == nullptr) throw ModelError(std::string(name()) + ": input 'query' is missing.");
  std::vector<int64_t> shape = shape_of(api_, query);
  if (shape.empty() || shape.back() != dim_) {
    throw ModelError(std::string(name()) + ": input 'query' must have a last axis of " +
                     std::to_string(dim_) + " like the inducing points, but has " +
                     (shape.empty() ? "rank 0" : std::to_string(shape.back())) + ".");
  }
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) count *= shape[axis];
  const float* queries = data_of<const float>(api_, query);
  shape.back() = 1;
  float* s = output<float>(api_, context, kS, shape);
  shape.back() = k_;
  int64_t* neighbours = output<int64_t>(api_, context, kNeighbours, shape);
  if (count == 0) return;

  const int64_t chunk = std::clamp<int64_t>(count / kFewestTasks, 1, kLargestChunk);
  parallel_for(api_, context, (count + chunk - 1) / chunk, [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * chunk;
    answer(queries + first * dim_, std::min(chunk, count - first), s ? s + first : nullptr,
           neighbours ? neighbours + first * k_ : nullptr);
  });
}

void Kernel::answer(const float* queries, int64_t count, float* s, int64_t* neighbours) const {
  const int64_t candidates = index_->candidates(k_);
  Solver solver(dim_, k_, length_scale_, jitter_);
  std::vector<float> points(candidates * dim_);  // (candidates, d)
  std::vector<int64_t> ids(candidates);          // (candidates)
  std::vector<double> squared(k_);               // (k)
  struct Ranked {
    double squared_distance;
    int64_t id;
    const float* point;
    bool operator<(const Ranked& other) const {
      return std::pair(squared_distance, id) < std::pair(other.squared_distance, other.id);
    }
  };
  std::vector<Ranked> ranked;
  ranked.reserve(candidates);

  for (int64_t q = 0; q < count; ++q) {
    const float* query = queries + q * dim_;
    int64_t* row = neighbours ? neighbours + q * k_ : nullptr;
    if (row) std::fill_n(row, k_, -1);
    if (!std::all_of(query, query + dim_, [](float x) { return std::isfinite(x); })) {
      if (s) s[q] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }

    index_->search(query, candidates, ids.data());
    ranked.clear();
    for (int64_t i = 0; i < candidates; ++i) {
      if (ids[i] < 0) continue;
      float* point = points.data() + i * dim_;
      index_->point(ids[i], point);
      double squared_distance = 0;
      for (int64_t axis = 0; axis < dim_; ++axis) {
        const double difference = static_cast<double>(point[axis]) - query[axis];
        squared_distance += difference * difference;
      }
      ranked.push_back({squared_distance, ids[i], point});
    }
    std::sort(ranked.begin(), ranked.end());
    const int64_t found = std::min<int64_t>(k_, ranked.size());

    for (int64_t i = 0; i < found; ++i) {
      squared[i] = ranked[i].squared_distance;
      if (row) row[i] = ranked[i].id;
      double* centred = solver.neighbour(i);
      for (int64_t axis = 0; axis < dim_; ++axis) {
        centred[axis] = static_cast<double>(ranked[i].point[axis]) - query[axis];
      }
    }
    if (s) s[q] = static_cast<float>(solver.unexplained(found, squared.data()));
  }
}

void infer_shapes(const ort::Api* api, ort::ShapeInferContext* context) {
  ort::TensorInfo* query = nullptr;
  check(api, ort::ShapeInferContext_GetInputTypeShape(api, context, kQuery, &query));
  if (query == nullptr) return;
  size_t rank = 0;
  check(api, ort::GetDimensionsCount(api, query, &rank));
  if (rank == 0) return;  // also what an unknown rank looks like
  std::vector<int64_t> dims(rank);
  std::vector<const char*> names(rank, "");
  check(api, ort::GetDimensions(api, query, dims.data(), rank));
  check(api, ort::GetSymbolicDimensions(api, query, names.data(), rank));
  for (size_t axis = 0; axis + 1 < rank; ++axis) {
    const bool named = names[axis] != nullptr && *names[axis] != '\0';
    if (!named) names[axis] = "";
    // Passed on, an unknown dimension without a name would become a literal -1.
    if (!named && dims[axis] < 0) return;
  }
  dims.back() = 1;
  names.back() = "";

  // Only s: the last axis of the neighbours is the value of k, which is not known here.
  ort::TensorInfo* raw = nullptr;
  check(api, ort::CreateTensorTypeAndShapeInfo(api, &raw));
  const auto release = [api](ort::TensorInfo* p) { ort::ReleaseTensorTypeAndShapeInfo(api, p); };
  const std::unique_ptr<ort::TensorInfo, decltype(release)> held(raw, release);
  check(api, ort::SetTensorElementType(api, raw, kOutputTypes[kS]));
  check(api, ort::SetDimensions(api, raw, dims.data(), rank));
  check(api, ort::SetSymbolicDimensions(api, raw, names.data(), rank));
  check(api, ort::ShapeInferContext_SetOutputTypeShape(api, context, kS, raw));
}

}  // namespace gapa
