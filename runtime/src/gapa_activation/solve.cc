#include "gapa_activation/solve.h"

#include <Eigen/Cholesky>
#include <algorithm>

namespace gapa {
namespace {

// G is positive semi-definite, so G + jitter·I fails to factorise only if the jitter drowns in the
// rounding of G, which is below 1e-12 for any k in use. More jitter can only raise s.
constexpr double kJitterFloor = 1e-12;
constexpr double kJitterGrowth = 10;
constexpr int kAttempts = 8;

}  // namespace

Solver::Solver(int64_t dim, int64_t capacity, double length_scale, double jitter)
    : inverse_width_(0.5 / (length_scale * length_scale)),
      jitter_(jitter),
      centred_(dim, capacity),
      gram_(capacity, capacity),
      factor_(capacity, capacity),
      squared_(capacity),
      correlation_(capacity) {}

double Solver::unexplained(int64_t count, const double* squared_distances) {
  std::copy_n(squared_distances, count, squared_.data());
  auto correlation = correlation_.head(count);
  correlation = (squared_.head(count).array() * -inverse_width_).exp();
  // Far from every neighbour (or without one) nothing is explained.
  if (count == 0 || correlation.maxCoeff() == 0) return 1;

  fill_gram(count);
  double jitter = jitter_;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (factorise(count, jitter)) {
      factor_.topLeftCorner(count, count).triangularView<Eigen::Lower>().solveInPlace(correlation);
      return std::clamp(1 - correlation.squaredNorm(), 0.0, 1.0);
    }
    jitter = std::max(kJitterGrowth * jitter, kJitterFloor);
  }
  return 1;  // the prior variance: an upper bound whatever G is
}

void Solver::fill_gram(int64_t count) {
  const auto neighbours = centred_.leftCols(count);
  auto gram = gram_.topLeftCorner(count, count);
  gram.triangularView<Eigen::Lower>().setZero();
  gram.selfadjointView<Eigen::Lower>().rankUpdate(neighbours.transpose(), -2.0);
  for (int64_t j = 0; j < count; ++j) {
    auto column = gram.col(j).tail(count - j).array();
    // Two equal points may come out a rounding below distance 0.
    column =
        ((column + squared_.segment(j, count - j).array() + squared_[j]).max(0.0) * -inverse_width_)
            .exp();
    gram(j, j) = 1;
  }
}

bool Solver::factorise(int64_t count, double jitter) {
  auto factor = factor_.topLeftCorner(count, count);
  factor.triangularView<Eigen::Lower>() = gram_.topLeftCorner(count, count);
  factor.diagonal().array() += jitter;
  Eigen::Ref<Eigen::MatrixXd> in_place(factor);
  return Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>>(in_place).info() == Eigen::Success;
}

}  // namespace gapa
