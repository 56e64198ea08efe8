#include "gapa_activation/solve.h"

#include <algorithm>
#include <cmath>

#include "simd/kernels.h"

namespace gapa {
namespace {

// G is positive semi-definite, so G + jitter·I fails to factorise only if the jitter drowns in the
// rounding of G, which is below 1e-12 for any k in use. More jitter can only raise s.
constexpr double kJitterFloor = 1e-12;
constexpr double kJitterGrowth = 10;
constexpr int kAttempts = 8;

// exp(−x) is a denormal number from here on, and soon 0.
constexpr double kFar = 708;

int64_t padded(int64_t rows) {
  const int64_t padding = simd::kernels().padding;
  return (rows + padding - 1) / padding * padding;
}

}  // namespace

Solver::Solver(int64_t dim, int64_t capacity, double length_scale, double jitter)
    : dim_(dim),
      inverse_width_(0.5 / (length_scale * length_scale)),
      jitter_(jitter),
      size_(padded(capacity + 1)),
      scratch_(simd::kGramAxes * size_),
      squared_(size_),
      gram_(size_ * size_),
      factor_(size_ * size_),
      points_(capacity) {}

bool Solver::is_far(double squared_distance) const {
  return !(inverse_width_ * squared_distance < kFar);
}

bool Solver::factorise(const double* centre, const std::vector<Neighbour>& neighbours) {
  const simd::Kernels& kernels = simd::kernels();
  const int64_t count = neighbours.size();
  stride_ = padded(count + 1);
  std::fill_n(squared_.data(), stride_, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    squared_[i] = neighbours[i].squared_distance;
    points_[i] = neighbours[i].point;
  }
  kernels.gram(points_.data(), count, centre, squared_.data(), dim_, stride_, inverse_width_,
               scratch_.data(), gram_.data());
  for (int64_t j = 0; j < count; ++j) {
    if (!is_far(squared_[j])) continue;
    std::fill_n(gram_.data() + j * stride_, stride_, 0.0);
    for (int64_t column = 0; column < j; ++column) gram_[column * stride_ + j] = 0;
    gram_[j * stride_ + j] = 1;
  }
  double jitter = jitter_;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (kernels.factorise(gram_.data(), count, stride_, jitter, factor_.data())) return true;
    jitter = std::max(kJitterGrowth * jitter, kJitterFloor);
  }
  return false;
}

double Solver::unexplained(const double* query, const std::vector<Neighbour>& neighbours) {
  // Far from every neighbour (or without one) nothing is explained.
  const auto explains = [this](const Neighbour& neighbour) {
    return !is_far(neighbour.squared_distance);
  };
  if (std::none_of(neighbours.begin(), neighbours.end(), explains)) return 1;
  if (!factorise(query, neighbours)) return 1;  // the prior variance: an upper bound whatever G is
  const int64_t count = neighbours.size();
  double explained = 0;
  for (int64_t j = 0; j < count; ++j) {
    const double component = factor_[j * stride_ + count];
    explained += component * component;
  }
  return std::clamp(1 - explained, 0.0, 1.0);
}

int64_t Solver::known_size(int64_t count) {
  const int64_t wide = simd::kernels().lanes / 2, blocks = count / wide, rest = count % wide;
  const int64_t width = (count + wide - 1) / wide * wide;
  return width + wide * wide * blocks * (blocks + 1) / 2 + rest * width;
}

void Solver::prepare(const std::vector<Neighbour>& neighbours, double* known) {
  const simd::Kernels& kernels = simd::kernels();
  const int64_t count = neighbours.size(), wide = kernels.lanes / 2;
  const int64_t width = (count + wide - 1) / wide * wide, in_blocks = count / wide * wide;
  const float* const first = neighbours[0].point;
  const std::vector<double> origin(first, first + dim_);
  std::vector<Neighbour> around = neighbours;
  std::fill_n(known, known_size(count), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    known[i] = kernels.squared_distance(around[i].point, origin.data(), dim_);
    around[i].squared_distance = known[i];
  }
  if (!factorise(origin.data(), around)) return;
  double* const blocks = known + width;
  double* const rest = blocks + in_blocks * (in_blocks + wide) / 2;
  std::vector<double> column(count);
  for (int64_t c = 0; c < count; ++c) {
    if (is_far(known[c]))
      continue;  // of a query, whose nearest point is the origin, it explains nothing
    // L x = e_c, forwards, a column of L at a time.
    std::fill(column.begin() + c, column.end(), 0.0);
    column[c] = 1;
    for (int64_t row = c; row < count; ++row) {
      const double* const factor = factor_.data() + row * stride_;
      const double x = column[row] / factor[row];
      for (int64_t below = row + 1; below < count; ++below) column[below] -= factor[below] * x;
      const int64_t block = row / wide;
      if (row < in_blocks) {
        blocks[(wide * block * (block + 1) / 2 + c) * wide + row % wide] = x;
      } else {
        rest[(row - in_blocks) * width + c] = x;
      }
    }
  }
}

}  // namespace gapa
