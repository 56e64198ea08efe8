// Exact nearest neighbours from lower bounds of the distances in a few directions.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "aligned.h"
#include "simd/kernels.h"

namespace gapa {

/// The points along the few directions in which they vary most, for a scan that reads little.
///
/// With V the directions, p and q centred, p₁ = Vp and ‖p₂‖² = ‖p‖² − ‖p₁‖² (and the same for q),
///
///   ½‖p‖² − q·p  ≥  ½‖p‖² − q₁·p₁ − ‖q₂‖‖p₂‖,
///
/// a dot product of r + 1 numbers. Whoever is beyond the true distance of k others by this bound is
/// not among the k nearest; the others are left to an exact comparison. So the answer is that of a
/// scan of all axes, whatever the directions; only the time depends on them.
class ReducedPoints {
 public:
  /// nullptr where the points, as queries for their k nearest, show that it would not pay.
  static std::unique_ptr<const ReducedPoints> make(const float* points, int64_t count, int64_t dim,
                                                   int64_t k);

  /// Numbers that are read per point.
  int64_t width() const { return width_; }

  /// Writes to rows[i] those of the points begin … end-1 among which the k nearest of query i
  /// certainly are. Where these would be too many to be worth it, it adds i to `unsettled` instead.
  /// `queries` are finite, d numbers each.
  void search(const std::vector<const float*>& queries, int64_t k, int64_t begin, int64_t end,
              std::vector<std::vector<int64_t>>* rows, std::vector<int32_t>* unsettled) const;

 private:
  class Search;

  ReducedPoints(const float* points, int64_t count, int64_t dim);

  /// Directions of the largest variance, the largest first, from a sample of the points.
  void find_directions(int64_t most);
  /// How many directions make a search for k of the points cheapest; 0 if none do.
  int64_t best_width(int64_t k) const;
  void pack(int64_t width);

  const float* points_;  ///< (M, d)
  int64_t count_, dim_;
  int64_t width_ = 0;                   ///< directions + 1
  std::vector<float> centre_;           ///< (d)
  std::vector<double> basis_;           ///< (directions, d), orthonormal
  double largest_norm_ = 0;             ///< of a centred point
  AlignedArray<float> coordinates_{0};  ///< (panels, width, lanes): p₁, then ‖p₂‖
  AlignedArray<float> half_norms_{0};   ///< (panels, lanes): ½‖p‖², +∞ where there is no point
};

}  // namespace gapa
