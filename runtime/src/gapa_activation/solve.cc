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

double Solver::unexplained(const double* query, const std::vector<Neighbour>& neighbours) {
  const int64_t count = neighbours.size();
  // Far from every neighbour (or without one) nothing is explained.
  if (count == 0 || std::exp(-inverse_width_ * neighbours[0].squared_distance) == 0) return 1;

  const simd::Kernels& kernels = simd::kernels();
  const int64_t stride = padded(count + 1);
  std::fill_n(squared_.data(), stride, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    squared_[i] = neighbours[i].squared_distance;
    points_[i] = neighbours[i].point;
  }
  kernels.gram(points_.data(), count, query, squared_.data(), dim_, stride, inverse_width_,
               scratch_.data(), gram_.data());

  double jitter = jitter_;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (kernels.factorise(gram_.data(), count, stride, jitter, factor_.data())) {
      double explained = 0;
      for (int64_t j = 0; j < count; ++j) {
        const double component = factor_[j * stride + count];
        explained += component * component;
      }
      return std::clamp(1 - explained, 0.0, 1.0);
    }
    jitter = std::max(kJitterGrowth * jitter, kJitterFloor);
  }
  return 1;  // the prior variance: an upper bound whatever G is
}

}  // namespace gapa
