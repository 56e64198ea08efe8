// The unexplained share of a query given the neighbourhood of its nearest point.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "aligned.h"
#include "gapa_activation/parameters.h"
#include "gapa_activation/solve.h"

namespace gapa {

/// Factors of the neighbourhoods, each computed when it is first needed and then kept.
///
/// With G_j + jitter·I = L Lᵀ for the neighbourhood of point j, s = 1 − ‖L⁻¹k‖²; L⁻¹ does not
/// depend on the query. L⁻¹k is exact to some 1e-12 (rounding times √cond), and so is s. Which
/// points have their factor kept is fixed: the first ones, as many as there is memory for; for the
/// others it is a solve per query. So a query has one answer, whatever came before it.
class LocalFactors {
 public:
  LocalFactors(const Parameters& parameters, const LocalParts& parts);

  /// Rows of the k neighbours of point j.
  const int32_t* neighbours(int64_t j) const { return neighbourhoods_ + j * width_; }

  /// What one thread needs to work with.
  struct Workspace {
    std::vector<double> room;
    std::vector<Neighbour> neighbours;
    std::optional<Solver> solver;
  };
  double unexplained(const float* query, int64_t j, Workspace* workspace) const;

  /// Asks for the factor of point j ahead of its use.
  void fetch(int64_t j) const;

 private:
  static constexpr int64_t kMostBytes = int64_t{48} << 20;
  static constexpr size_t kMutexes = 32;

  const double* known(int64_t j, Workspace* workspace) const;
  Solver& solver(Workspace* workspace) const;

  int64_t dim_, k_;
  double length_scale_, jitter_;
  const float* points_;                 ///< (M, d)
  const int32_t* neighbourhoods_;       ///< (M, N)
  int64_t width_;                       ///< N
  int64_t size_;                        ///< numbers that are kept of one neighbourhood
  int64_t kept_;                        ///< points for which they are
  mutable AlignedArray<double> known_;  ///< (kept, size), see simd::Kernels::explained
  std::unique_ptr<std::atomic<bool>[]> ready_;
  mutable std::array<std::mutex, kMutexes> mutexes_;
};

}  // namespace gapa
