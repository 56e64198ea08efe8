#include "gapa_activation/scan.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

namespace gapa {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Products of two norms up to here stay far from the end of float32.
constexpr double kLargestNorm = 1e18;
// ε of the bound must stay a small number; wider points than this do not occur.
constexpr int64_t kLargestDim = 1 << 17;
// The k-th smallest bound is looked up again whenever this many candidates per neighbour wait.
constexpr int64_t kRoomPerNeighbour = 3;
constexpr int kBisections = 40;

int64_t panel_count(int64_t points) {
  const int64_t lanes = simd::kernels().lanes;
  return (points + lanes - 1) / lanes;
}

}  // namespace

PackedPoints::PackedPoints(const float* points, int64_t count, int64_t dim)
    : count_(count),
      dim_(dim),
      centre_(dim),
      coordinates_(panel_count(count) * simd::kernels().lanes * dim),
      half_norms_(panel_count(count) * simd::kernels().lanes),
      largest_norms_(panel_count(count)),
      bounded_(dim <= kLargestDim) {
  const int64_t lanes = simd::kernels().lanes;
  std::vector<double> sums(dim);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t axis = 0; axis < dim; ++axis) sums[axis] += points[row * dim + axis];
  }
  for (int64_t axis = 0; axis < dim; ++axis) centre_[axis] = static_cast<float>(sums[axis] / count);

  for (int64_t panel = 0; panel < panel_count(count); ++panel) {
    float* panel_data = coordinates_.data() + panel * dim * lanes;
    double largest = 0;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = panel * lanes + lane;
      double squared = 0;
      for (int64_t axis = 0; axis < dim; ++axis) {
        const float x = row < count ? points[row * dim + axis] - centre_[axis] : 0;
        panel_data[axis * lanes + lane] = x;
        squared += static_cast<double>(x) * x;
      }
      largest = std::max(largest, squared);
      half_norms_[row] = row < count ? static_cast<float>(squared / 2) : kInfinity;
    }
    const double norm = std::sqrt(largest);
    largest_norms_[panel] = static_cast<float>(norm * (1 + 1e-6));
    bounded_ = bounded_ && norm < kLargestNorm;  // also false for a NaN
  }
}

Scan::Scan(const PackedPoints& points, const std::vector<const float*>& queries, int64_t k)
    : points_(points),
      k_(std::min(k, points.count())),
      tile_points_(simd::kernels().lanes * simd::kernels().panels),
      first_room_(kRoomPerNeighbour * k_ + 4 * tile_points_),
      all_(queries.size()),
      centred_(queries.size() * points.dim_),
      scores_(queries.size() * first_room_),
      rows_(queries.size() * first_room_),
      query_norms_(queries.size()),
      candidates_(queries.size()),
      lists_(queries.size()) {
  const int64_t n = queries.size(), dim = points.dim_;
  for (int64_t i = 0; i < n; ++i) {
    all_[i] = static_cast<int32_t>(i);
    float* const row = centred_.data() + i * dim;
    const double norm =
        std::sqrt(simd::kernels().centred(queries[i], points.centre_.data(), dim, row));
    query_norms_[i] = static_cast<float>(norm * (1 + 1e-6));
    candidates_[i].room = first_room_;
    candidates_[i].bound = kInfinity;
    candidates_[i].unbounded = !points.bounded_ || !(norm < kLargestNorm);
    if (candidates_[i].unbounded) {
      query_norms_[i] = 0;
      std::fill_n(row, dim, 0.0f);
    }
    lists_[i] = {scores_.data() + i * first_room_, rows_.data() + i * first_room_, 0, 0};
  }
}

void Scan::grow(int64_t query, int64_t room) {
  Candidates& candidates = candidates_[query];
  simd::Shortlist& list = lists_[query];
  std::vector<float> scores(room);
  std::vector<int32_t> rows(room);
  std::copy_n(list.scores, list.count, scores.begin());
  std::copy_n(list.rows, list.count, rows.begin());
  candidates.scores = std::move(scores);
  candidates.rows = std::move(rows);
  candidates.room = room;
  list.scores = candidates.scores.data();
  list.rows = candidates.rows.data();
}

simd::ErrorBound Scan::error_bound(int64_t query) const {
  const float terms = static_cast<float>(points_.dim_ + 12);
  // The second part covers numbers that underflow, also where the caller flushes them to 0.
  return {1.2f * terms * 0x1p-24f, terms * FLT_MIN, query_norms_[query]};
}

float Scan::slack(int64_t query, float point_norm) const {
  const simd::ErrorBound error = error_bound(query);
  return error.a * point_norm * (0.5f * point_norm + error.q) +
         error.b * (1 + point_norm + error.q);
}

void Scan::over(int64_t begin, int64_t end, const int32_t* queries, int64_t count) {
  if (begin >= end) return;
  const simd::Kernels& kernels = simd::kernels();
  tile_rows_.resize(count);
  tile_lists_.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    tile_rows_[i] = centred_.data() + queries[i] * points_.dim_;
    tile_lists_[i] = &lists_[queries[i]];
  }
  const int64_t lanes = kernels.lanes, last = (end - 1) / lanes;
  for (int64_t panel = begin / lanes; points_.bounded_ && panel <= last;) {
    const int64_t width = std::min<int64_t>(kernels.panels, last + 1 - panel);
    const simd::Panels panels = {points_.coordinates_.data() + panel * points_.dim_ * lanes,
                                 points_.half_norms_.data() + panel * lanes,
                                 width,
                                 points_.dim_,
                                 panel * lanes,
                                 begin,
                                 end};
    const auto norms = points_.largest_norms_.begin() + panel;
    const float norm = *std::max_element(norms, norms + width);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = queries[i];
      const Candidates& candidates = candidates_[query];
      if (candidates.unbounded) {
        lists_[query].limit = -kInfinity;
        continue;
      }
      if (candidates.room - lists_[query].count < 2 * tile_points_) prune(query, false);
      lists_[query].limit = std::min(candidates.bound + slack(query, norm), FLT_MAX);
    }
    // Tiles of full width, then of the powers of two that make up the rest.
    int64_t first = 0;
    for (int64_t tile = kernels.queries; tile > 0; tile /= 2) {
      for (; count - first >= tile; first += tile) {
        kernels.scan(panels, {tile_rows_.data() + first, tile_lists_.data() + first, tile});
      }
    }
    panel += width;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t query = queries[i];
    simd::Shortlist& list = lists_[query];
    if (!candidates_[query].unbounded) continue;
    grow(query, list.count + end - begin);
    for (int64_t row = begin; row < end; ++row) {
      list.rows[list.count++] = static_cast<int32_t>(row);
    }
  }
}

void Scan::prune(int64_t query, bool exactly) {
  simd::Shortlist& list = lists_[query];
  Candidates& candidates = candidates_[query];
  if (list.count > k_) {
    const simd::Kernels& kernels = simd::kernels();
    slacks_.resize(list.count);
    uppers_.resize(list.count);
    const simd::Range range = kernels.worst_scores(
        list, points_.largest_norms_.data(), error_bound(query), slacks_.data(), uppers_.data());
    float low = range.least, high = range.largest;
    if (k_ == 1) high = low;
    // Bisection for a number that k of them do not exceed: no branch depends on the order of the
    // scores. Near enough is good enough while points still come.
    const int64_t enough = exactly ? k_ : k_ + k_ / 8;
    for (int step = 0; step < kBisections; ++step) {
      const float middle = low + (high - low) / 2;
      if (!(middle < high)) break;
      const int64_t within = kernels.count_up_to(uppers_.data(), list.count, middle);
      (within >= k_ ? high : low) = middle;
      if (within >= k_ && within <= enough) break;
    }
    candidates.bound = std::min(candidates.bound, high);
    kernels.keep(&list, slacks_.data(), candidates.bound);
  }
  // Many points at nearly one distance: all of them stay.
  if (candidates.room - list.count < 2 * tile_points_ + k_) {
    grow(query, 2 * candidates.room + 2 * tile_points_);
  }
}

void Scan::finish(int64_t i, std::vector<int64_t>* rows) {
  if (!candidates_[i].unbounded) prune(i, /*exactly=*/true);
  rows->assign(lists_[i].rows, lists_[i].rows + lists_[i].count);
}

}  // namespace gapa
