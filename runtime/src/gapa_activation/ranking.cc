#include "gapa_activation/ranking.h"

#include <algorithm>

#include "simd/kernels.h"

namespace gapa {
namespace {

constexpr int64_t kFloatsPerCacheLine = 16;
// Points fetched ahead of the one at hand. They lie anywhere in memory.
constexpr size_t kAhead = 4;

void fetch(const float* point, int64_t dim) {
  for (int64_t axis = 0; axis < dim; axis += kFloatsPerCacheLine) __builtin_prefetch(point + axis);
}

}  // namespace

void keep_nearest(const double* query, int64_t dim, int64_t k, std::vector<Neighbour>* neighbours) {
  const auto distance = simd::kernels().squared_distance;
  std::vector<Neighbour>& all = *neighbours;
  for (size_t i = 0; i < std::min(all.size(), kAhead); ++i) fetch(all[i].point, dim);
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + kAhead < all.size()) fetch(all[i + kAhead].point, dim);
    all[i].squared_distance = distance(all[i].point, query, dim);
  }
  const int64_t size = all.size();
  if (size > 2 * k) std::nth_element(all.begin(), all.begin() + k, all.end());
  if (size > 2 * k) all.resize(k);
  std::sort(all.begin(), all.end());
  if (static_cast<int64_t>(all.size()) > k) all.resize(k);
}

}  // namespace gapa
