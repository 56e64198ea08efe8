// The unexplained share of the prior variance, in double precision.
#pragma once

#include <cstdint>
#include <vector>

#include "gapa_activation/ranking.h"
#include "scratch.h"

namespace gapa {

/// Computes s = 1 − kᵀ (G + jitter·I)⁻¹ k for one query after another.
///
/// With the neighbours centred on the query, a_i = z̃_i − z,
///
///   k_i  = exp(−‖a_i‖² / 2ℓ²)
///   G_ij = exp(−(‖a_i‖² + ‖a_j‖² − 2 a_iᵀa_j) / 2ℓ²).
///
/// Centring keeps the cancellation in G small against ℓ² for all that lie near the query. Those so
/// far that k_i is 0 explain nothing, and what cancellation leaves of their rows of G may be far
/// from any covariance: they are left out, by rows and columns of the identity. G + jitter·I
/// = L Lᵀ and s = 1 − ‖L⁻¹k‖², clamped to [0, 1]. The query itself goes along as one more point
/// with a = 0: its row of G is k, and its row of L is L⁻¹k. It owns its workspace: one per thread.
class Solver {
 public:
  /// Room for up to `capacity` neighbours of dimension `dim`.
  Solver(int64_t dim, int64_t capacity, double length_scale, double jitter);

  double unexplained(const double* query, const std::vector<Neighbour>& neighbours);

  /// Writes what simd::Kernels::explained needs to know of some neighbours, `capacity` of them. If
  /// G cannot be factorised, L⁻¹ is 0, which makes s = 1.
  void prepare(const std::vector<Neighbour>& neighbours, double* known);

  /// How many numbers that is.
  static int64_t known_size(int64_t count);

 private:
  /// Whether a point at this squared distance has nothing to do with the centre: exp(…) is 0.
  bool is_far(double squared_distance) const;

  /// The Gram matrix and its factor around a point; false if that cannot be had.
  bool factorise(const double* centre, const std::vector<Neighbour>& neighbours);

  int64_t dim_;
  double inverse_width_;  ///< 1 / 2ℓ²
  double jitter_;
  int64_t stride_ = 0;  ///< of the matrices at hand
  // Rows and columns below: the neighbours, the query, zeros up to the width of the kernels' tiles.
  int64_t size_;
  Scratch<double> scratch_;  ///< (axes at a time, size): centred points
  Scratch<double> squared_;  ///< (size)
  Scratch<double> gram_;     ///< (size, size) by columns, lower triangle
  Scratch<double> factor_;   ///< (size, size) by columns, lower triangle
  std::vector<const float*> points_;
};

}  // namespace gapa
