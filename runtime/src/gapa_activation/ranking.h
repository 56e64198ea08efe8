// Candidates put in order by their exact distances.
#pragma once

#include <cstdint>
#include <vector>

namespace gapa {

struct Neighbour {
  double squared_distance;  ///< in double, by direct differences
  int64_t row;
  const float* point;

  bool operator<(const Neighbour& other) const {
    return squared_distance != other.squared_distance ? squared_distance < other.squared_distance
                                                      : row < other.row;
  }
};

/// Keeps the k nearest of a query of d numbers (or all, if there are fewer), sorted by distance and
/// then by row.
void keep_nearest(const double* query, int64_t dim, int64_t k, std::vector<Neighbour>* neighbours);

}  // namespace gapa
