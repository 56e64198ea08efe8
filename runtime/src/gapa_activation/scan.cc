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
    : points_(points), k_(std::min(k, points.count())) {
  const simd::Kernels& kernels = simd::kernels();
  const int64_t n = queries.size(), dim = points.dim_;
  tile_points_ = kernels.lanes * kernels.panels;
  packed_.resize(n * dim);
  query_norms_.resize(n);
  candidates_.resize(n);
  lists_.resize(n);

  // Tiles of full width, then of the powers of two that make up the rest.
  int64_t first = 0;
  for (int64_t width = kernels.queries; width > 0; width /= 2) {
    for (; n - first >= width; first += width) {
      tiles_.push_back({first, width, first * dim});
      for (int64_t q = 0; q < width; ++q) {
        pack(queries[first + q], width, packed_.data() + first * dim + q, first + q);
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) grow(i, kRoomPerNeighbour * k_ + 2 * tile_points_);
}

void Scan::pack(const float* query, int64_t width, float* to, int64_t i) {
  double squared = 0;
  for (int64_t axis = 0; axis < points_.dim_; ++axis) {
    const float x = query[axis] - points_.centre_[axis];
    to[axis * width] = -x;
    squared += static_cast<double>(x) * x;
  }
  const double norm = std::sqrt(squared);
  query_norms_[i] = static_cast<float>(norm * (1 + 1e-6));
  candidates_[i].bound = kInfinity;
  candidates_[i].unbounded = !points_.bounded_ || !(norm < kLargestNorm);
  if (candidates_[i].unbounded) {
    query_norms_[i] = 0;
    for (int64_t axis = 0; axis < points_.dim_; ++axis) to[axis * width] = 0;
  }
}

void Scan::grow(int64_t query, int64_t room) {
  Candidates& candidates = candidates_[query];
  candidates.scores.resize(room);
  candidates.rows.resize(room);
  lists_[query].scores = candidates.scores.data();
  lists_[query].rows = candidates.rows.data();
}

float Scan::slack(int64_t query, float point_norm) const {
  const float terms = static_cast<float>(points_.dim_ + 12);
  const float query_norm = query_norms_[query];
  const float relative = 1.2f * terms * 0x1p-24f;
  // The second part covers numbers that underflow, also where the caller flushes them to 0.
  return relative * point_norm * (0.5f * point_norm + query_norm) +
         terms * FLT_MIN * (1 + point_norm + query_norm);
}

void Scan::over(int64_t begin, int64_t end) {
  if (begin >= end) return;
  const simd::Kernels& kernels = simd::kernels();
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
    for (const Tile& tile : tiles_) {
      for (int64_t i = tile.first; i < tile.first + tile.count; ++i) {
        const int64_t free = candidates_[i].rows.size() - lists_[i].count;
        if (free < 2 * tile_points_) prune(i, /*exactly=*/false);
        const float limit = candidates_[i].bound + slack(i, norm);
        lists_[i].limit = candidates_[i].unbounded ? -kInfinity : std::min(limit, FLT_MAX);
      }
      kernels.scan(panels, {packed_.data() + tile.offset, tile.count}, &lists_[tile.first]);
    }
    panel += width;
  }
  for (size_t i = 0; i < candidates_.size(); ++i) {
    if (!candidates_[i].unbounded) continue;
    grow(i, lists_[i].count + end - begin);
    for (int64_t row = begin; row < end; ++row) {
      candidates_[i].rows[lists_[i].count++] = static_cast<int32_t>(row);
    }
  }
}

void Scan::prune(int64_t query, bool exactly) {
  simd::Shortlist& list = lists_[query];
  Candidates& candidates = candidates_[query];
  if (list.count > k_) {
    slacks_.resize(list.count);
    uppers_.resize(list.count);
    const int lane_bits = __builtin_ctz(simd::kernels().lanes);  // a division would cost more
    float low = kInfinity, high = -kInfinity;
    for (int64_t i = 0; i < list.count; ++i) {
      slacks_[i] = slack(query, points_.largest_norms_[list.rows[i] >> lane_bits]);
      uppers_[i] = list.scores[i] + slacks_[i];
      low = std::min(low, uppers_[i]);
      high = std::max(high, uppers_[i]);
    }
    // Bisection for a number that k of them do not exceed: no branch depends on the order of the
    // scores. Near enough is good enough while points still come.
    const int64_t enough = exactly ? k_ : k_ + k_ / 8;
    for (int step = 0; step < kBisections; ++step) {
      const float middle = low + (high - low) / 2;
      if (!(middle < high)) break;
      const int64_t within = simd::kernels().count_up_to(uppers_.data(), list.count, middle);
      (within >= k_ ? high : low) = middle;
      if (within >= k_ && within <= enough) break;
    }
    candidates.bound = std::min(candidates.bound, high);
    int64_t kept = 0;
    for (int64_t i = 0; i < list.count; ++i) {
      list.scores[kept] = list.scores[i];
      list.rows[kept] = list.rows[i];
      kept += list.scores[i] - slacks_[i] <= candidates.bound;
    }
    list.count = kept;
  }
  // Many points at nearly one distance: all of them stay.
  const int64_t size = candidates.rows.size();
  if (size - list.count < 2 * tile_points_ + k_) grow(query, 2 * size + 2 * tile_points_);
}

void Scan::finish(int64_t i, std::vector<int64_t>* rows) {
  if (!candidates_[i].unbounded) prune(i, /*exactly=*/true);
  rows->assign(lists_[i].rows, lists_[i].rows + lists_[i].count);
}

}  // namespace gapa
