#include "gapa_activation/kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "gapa_activation/ranking.h"
#include "gapa_activation/solve.h"
#include "status.h"

namespace gapa {
namespace {

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

  const auto answer_all = [&](int64_t block, const auto& search) {
    parallel_for(api_, context, (count + block - 1) / block, [&](size_t i) {
      const int64_t first = static_cast<int64_t>(i) * block;
      const Batch batch = finite_ones(queries, first, std::min(count, first + block));
      std::vector<Rows> candidates(batch.queries.size());
      search(batch, &candidates);
      answer(batch, candidates, s, neighbours);
    });
  };
  if (s) std::fill_n(s, count, std::numeric_limits<float>::quiet_NaN());
  if (neighbours) std::fill_n(neighbours, count * k_, -1);
  const Split split = index_->split(count);
  if (split.parts == 1) {
    answer_all(split.block, [&](const Batch& batch, std::vector<Rows>* candidates) {
      index_->search(batch.queries, k_, 0, 1, candidates);
    });
    return;
  }
  const Batch whole = finite_ones(queries, 0, count);
  std::vector<std::vector<Rows>> found(split.parts, std::vector<Rows>(whole.queries.size()));
  parallel_for(api_, context, split.parts, [&](size_t part) {
    index_->search(whole.queries, k_, part, split.parts, &found[part]);
  });
  answer_all(1, [&](const Batch& batch, std::vector<Rows>* candidates) {
    for (size_t i = 0; i < batch.queries.size(); ++i) {
      const auto at = std::find(whole.position.begin(), whole.position.end(), batch.position[i]);
      for (const std::vector<Rows>& part : found) {
        const Rows& rows = part[at - whole.position.begin()];
        (*candidates)[i].insert((*candidates)[i].end(), rows.begin(), rows.end());
      }
    }
  });
}

Kernel::Batch Kernel::finite_ones(const float* queries, int64_t begin, int64_t end) const {
  Batch batch;
  for (int64_t q = begin; q < end; ++q) {
    const float* query = queries + q * dim_;
    if (!std::all_of(query, query + dim_, [](float x) { return std::isfinite(x); })) continue;
    batch.queries.push_back(query);
    batch.position.push_back(q);
  }
  return batch;
}

void Kernel::answer(const Batch& batch, const std::vector<Rows>& candidates, float* s,
                    int64_t* neighbours) const {
  if (batch.queries.empty()) return;
  Solver solver(dim_, k_, length_scale_, jitter_);
  std::vector<Neighbour> nearest;
  std::vector<double> query(dim_);
  std::vector<float> decoded;
  for (size_t i = 0; i < batch.queries.size(); ++i) {
    const int64_t found = candidates[i].size();
    if (index_->decodes()) decoded.resize(found * dim_);
    nearest.clear();
    for (int64_t c = 0; c < found; ++c) {
      float* scratch = decoded.empty() ? nullptr : decoded.data() + c * dim_;
      nearest.push_back({0, candidates[i][c], index_->point(candidates[i][c], scratch)});
    }
    std::copy_n(batch.queries[i], dim_, query.begin());
    keep_nearest(query.data(), dim_, k_, &nearest);
    const int64_t position = batch.position[i];
    if (neighbours) {
      int64_t* row = neighbours + position * k_;
      for (size_t c = 0; c < nearest.size(); ++c) row[c] = nearest[c].row;
    }
    if (s) s[position] = static_cast<float>(solver.unexplained(query.data(), nearest));
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
