// Exact nearest neighbours by scanning packed points at the rate of a matrix product.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned.h"
#include "scratch.h"
#include "simd/kernels.h"

namespace gapa {

/// Points in the layout of the scan: centred on their mean, in panels of one point per vector lane.
class PackedPoints {
 public:
  PackedPoints(const float* points, int64_t count, int64_t dim);  ///< copies (count, dim)

  int64_t count() const { return count_; }
  int64_t dim() const { return dim_; }

 private:
  friend class Scan;

  int64_t count_, dim_;
  std::vector<float> centre_;         ///< (d)
  AlignedArray<float> coordinates_;   ///< (panels, d, lanes)
  AlignedArray<float> half_norms_;    ///< (panels, lanes): ½‖p‖², +∞ where there is no point
  std::vector<float> largest_norms_;  ///< (panels): the largest ‖p‖
  bool bounded_;                      ///< no score can overflow
};

/// Finds rows among which the k nearest certainly are.
///
/// With points p and query q centred, a point's score ½‖p‖² − q·p is half its squared distance but
/// for ½‖q‖². It is summed in float32, d terms, so it is off by at most
///
///   ε (½‖p‖² + ‖q‖‖p‖),   ε = (d + 12) 2⁻²⁴ with a margin,
///
/// whatever the order of the sum. A row is dropped only if k others are nearer even if all scores
/// are off by that much. So the k nearest by exact distances do not depend on how queries were
/// grouped, nor on the instruction set, although scores do.
class Scan {
 public:
  /// `queries` are finite, d numbers each.
  Scan(const PackedPoints& points, const std::vector<const float*>& queries, int64_t k);

  /// Compares all queries with the points of rows begin … end-1.
  void over(int64_t begin, int64_t end) { over(begin, end, all_.data(), all_.size()); }

  /// Compares some queries, named by their numbers, with the points of rows begin … end-1.
  void over(int64_t begin, int64_t end, const int32_t* queries, int64_t count);

  /// Writes the rows that may be among the k nearest of query i, in any order. If these are k, or
  /// all that were compared, then they are the nearest.
  void finish(int64_t i, std::vector<int64_t>* rows);

 private:
  /// The candidates of a query: room for them, and the limit that they have set so far.
  struct Candidates {
    int64_t room;
    std::vector<float> scores;  ///< empty while the first room is enough
    std::vector<int32_t> rows;
    float bound;     ///< at least k scores are certainly at most this
    bool unbounded;  ///< scores could overflow: every row is a candidate
  };

  void grow(int64_t query, int64_t room);
  void prune(int64_t query, bool exactly);
  simd::ErrorBound error_bound(int64_t query) const;
  float slack(int64_t query, float point_norm) const;

  const PackedPoints& points_;
  int64_t k_, tile_points_;
  int64_t first_room_;                   ///< candidates that a query has room for at first
  std::vector<int32_t> all_;             ///< (n): 0, 1, …
  Scratch<float> centred_;               ///< (n, d)
  Scratch<float> scores_;                ///< (n, first room)
  Scratch<int32_t> rows_;                ///< (n, first room)
  std::vector<float> query_norms_;       ///< (n)
  std::vector<Candidates> candidates_;   ///< (n)
  std::vector<simd::Shortlist> lists_;   ///< (n): the candidates as the kernels see them
  std::vector<float> slacks_, uppers_;   ///< workspace of prune()
  std::vector<const float*> tile_rows_;  ///< workspace of over()
  std::vector<simd::Shortlist*> tile_lists_;
};

}  // namespace gapa
