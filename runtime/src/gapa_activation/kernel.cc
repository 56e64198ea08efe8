#include "gapa_activation/kernel.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "gapa_activation/ranking.h"
#include "gapa_activation/schema.h"
#include "gapa_activation/solve.h"
#include "tensors.h"

namespace gapa {
namespace {

// Queries with little to do for each: the more at a time, the more of them share what is read.
constexpr int64_t kLeastLocalBlock = 16, kMostLocalBlock = 128;

}  // namespace

ActivationKernel::ActivationKernel(const ort::Api* api, const OpSchema& schema,
                                   const Parameters& parameters)
    : Kernel(api, schema.name),
      k_(parameters.k),
      dim_(parameters.dim),
      length_scale_(parameters.length_scale),
      jitter_(parameters.jitter),
      index_(make_index(parameters)) {
  if (const auto* parts = std::get_if<LocalParts>(&parameters.index)) {
    local_ = std::make_unique<LocalFactors>(parameters, *parts);
  }
}

void UnfoldedKernel::compute(ort::KernelContext* context) const {
  const Parameters parameters = read_parameters(ConstantReader(api_, context, schema_), kind_);
  ActivationKernel(api_, schema_, parameters).compute(context);
}

void ActivationKernel::compute(ort::KernelContext* context) const {
  const Input<float> query = input<float>(api_, context, kQuery, name(), "query");
  std::vector<int64_t> shape = query.shape;
  if (shape.empty() || shape.back() != dim_) {
    throw ModelError(std::string(name()) + ": input 'query' must have a last axis of " +
                     std::to_string(dim_) + " like the inducing points, but has " +
                     (shape.empty() ? "rank 0" : std::to_string(shape.back())) + ".");
  }
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) count *= shape[axis];
  const float* queries = query.data;
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
      if (local_) {
        answer_locally(batch, candidates, s, neighbours);
      } else {
        answer(batch, candidates, s, neighbours);
      }
    });
  };
  if (s) std::fill_n(s, count, std::numeric_limits<float>::quiet_NaN());
  if (neighbours) std::fill_n(neighbours, count * k_, -1);
  const int64_t searched = local_ ? 1 : k_;
  Split split = index_->split(count);
  if (local_ && split.parts == 1) {
    split.block = std::clamp(count / 4, kLeastLocalBlock, kMostLocalBlock);
  }
  if (split.parts == 1) {
    answer_all(split.block, [&](const Batch& batch, std::vector<Rows>* candidates) {
      index_->search(batch.queries, searched, 0, 1, candidates);
    });
    return;
  }
  const Batch whole = finite_ones(queries, 0, count);
  std::vector<std::vector<Rows>> found(split.parts, std::vector<Rows>(whole.queries.size()));
  parallel_for(api_, context, split.parts, [&](size_t part) {
    index_->search(whole.queries, searched, part, split.parts, &found[part]);
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

ActivationKernel::Batch ActivationKernel::finite_ones(const float* queries, int64_t begin,
                                                      int64_t end) const {
  Batch batch;
  for (int64_t q = begin; q < end; ++q) {
    const float* query = queries + q * dim_;
    int finite = 1;  // all are looked at: a loop with an exit takes one number at a time
    for (int64_t axis = 0; axis < dim_; ++axis) finite &= std::fabs(query[axis]) <= FLT_MAX;
    if (!finite) continue;
    batch.queries.push_back(query);
    batch.position.push_back(q);
  }
  return batch;
}

void ActivationKernel::answer(const Batch& batch, const std::vector<Rows>& candidates, float* s,
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

void ActivationKernel::answer_locally(const Batch& batch, const std::vector<Rows>& candidates,
                                      float* s, int64_t* neighbours) const {
  const size_t count = batch.queries.size();
  std::vector<int64_t> nearest(count, -1);
  std::vector<Neighbour> ranked;
  for (size_t i = 0; i < count; ++i) {
    if (candidates[i].size() == 1) {
      nearest[i] = candidates[i][0];  // the search was sure
    } else if (candidates[i].size() > 1) {
      ranked.clear();
      for (const int64_t row : candidates[i])
        ranked.push_back({0, row, index_->point(row, nullptr)});
      const std::vector<double> query(batch.queries[i], batch.queries[i] + dim_);
      keep_nearest(query.data(), dim_, 1, &ranked);
      nearest[i] = ranked[0].row;
    }
  }
  // In the order of their points, which share neighbours: what one query reads the next finds near.
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return nearest[a] < nearest[b]; });
  LocalFactors::Workspace workspace;
  for (size_t turn = 0; turn < count; ++turn) {
    if (turn + 1 < count) local_->fetch(nearest[order[turn + 1]]);
    const int32_t i = order[turn];
    const int64_t position = batch.position[i], j = nearest[i];
    if (j < 0) {  // no list within reach holds a point
      if (s) s[position] = 1;
      continue;
    }
    if (neighbours) std::copy_n(local_->neighbours(j), k_, neighbours + position * k_);
    if (s) {
      s[position] = static_cast<float>(local_->unexplained(batch.queries[i], j, &workspace));
    }
  }
}

}  // namespace gapa
