// The unexplained share of the prior variance, in double precision.
#pragma once

#include <Eigen/Core>
#include <cstdint>

namespace gapa {

/// Computes s = 1 − kᵀ (G + jitter·I)⁻¹ k for one query after another.
///
/// With the neighbours centred on the query, a_i = z̃_i − z,
///
///   k_i  = exp(−‖a_i‖² / 2ℓ²)
///   G_ij = exp(−(‖a_i‖² + ‖a_j‖² − 2 a_iᵀa_j) / 2ℓ²).
///
/// Centring keeps the cancellation in G small against ℓ² wherever s is not 1 anyway. G + jitter·I
/// = L Lᵀ and s = 1 − ‖L⁻¹k‖², clamped to [0, 1]. It owns its workspace: one per thread.
class Solver {
 public:
  /// Room for up to `capacity` neighbours of dimension `dim`.
  Solver(int64_t dim, int64_t capacity, double length_scale, double jitter);

  /// Column i is where neighbour i is to be written, centred on the query; d doubles.
  double* neighbour(int64_t i) { return centred_.col(i).data(); }

  /// s for the neighbours in columns 0 … count-1, given their squared distances ‖a_i‖².
  double unexplained(int64_t count, const double* squared_distances);

 private:
  void fill_gram(int64_t count);
  bool factorise(int64_t count, double jitter);

  double inverse_width_;  ///< 1 / 2ℓ²
  double jitter_;
  // Owned and aligned, never views of foreign memory: Eigen peels loops by alignment, and the bits
  // of a result must not depend on where a query happens to lie.
  Eigen::MatrixXd centred_;      ///< (d, capacity)
  Eigen::MatrixXd gram_;         ///< (capacity, capacity), lower triangle
  Eigen::MatrixXd factor_;       ///< (capacity, capacity), lower triangle
  Eigen::VectorXd squared_;      ///< (capacity)
  Eigen::VectorXd correlation_;  ///< (capacity), k and then L⁻¹k
};

}  // namespace gapa
