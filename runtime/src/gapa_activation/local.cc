#include "gapa_activation/local.h"

#include <algorithm>

#include "simd/kernels.h"

namespace gapa {
namespace {

constexpr int64_t kDoublesPerCacheLine = 8;
// L⁻¹ grows with 1/√jitter, and with it what rounding does to L⁻¹k.
constexpr double kLeastJitter = 1e-12;

}  // namespace

LocalFactors::LocalFactors(const Parameters& parameters, const LocalParts& parts)
    : dim_(parameters.dim),
      k_(parameters.k),
      length_scale_(parameters.length_scale),
      jitter_(std::max(parameters.jitter, kLeastJitter)),
      points_(parts.points.data),
      neighbourhoods_(parts.neighbourhoods.data),
      width_(parts.neighbourhoods.shape[1]),
      size_(Solver::known_size(k_)),
      kept_(std::min<int64_t>(parameters.count,
                              kMostBytes / static_cast<int64_t>(sizeof(double)) / size_)),
      known_(kept_ * size_),
      ready_(new std::atomic<bool>[kept_]()) {}

Solver& LocalFactors::solver(Workspace* workspace) const {
  if (!workspace->solver) workspace->solver.emplace(dim_, k_, length_scale_, jitter_);
  return *workspace->solver;
}

const double* LocalFactors::known(int64_t j, Workspace* workspace) const {
  double* const known = known_.data() + j * size_;
  if (ready_[j].load(std::memory_order_acquire)) return known;
  Solver& solver = this->solver(workspace);
  const std::lock_guard<std::mutex> lock(mutexes_[j % kMutexes]);
  if (!ready_[j].load(std::memory_order_relaxed)) {
    workspace->neighbours.clear();
    for (int64_t i = 0; i < k_; ++i) {
      const int64_t row = neighbours(j)[i];
      workspace->neighbours.push_back({0, row, points_ + row * dim_});
    }
    solver.prepare(workspace->neighbours, known);
    ready_[j].store(true, std::memory_order_release);
  }
  return known;
}

double LocalFactors::unexplained(const float* query, int64_t j, Workspace* workspace) const {
  const simd::Kernels& kernels = simd::kernels();
  if (j < kept_) {
    workspace->room.resize(dim_ + k_ + kernels.lanes);
    const double scale = 0.5 / (length_scale_ * length_scale_);
    const double explained = kernels.explained(points_, neighbours(j), k_, query, dim_, scale,
                                               known(j, workspace), workspace->room.data());
    return std::clamp(1 - explained, 0.0, 1.0);
  }
  const std::vector<double> wide(query, query + dim_);
  workspace->neighbours.clear();
  for (int64_t i = 0; i < k_; ++i) {
    const int64_t row = neighbours(j)[i];
    const float* point = points_ + row * dim_;
    workspace->neighbours.push_back(
        {kernels.squared_distance(point, wide.data(), dim_), row, point});
  }
  return solver(workspace).unexplained(wide.data(), workspace->neighbours);
}

void LocalFactors::fetch(int64_t j) const {
  if (j < 0 || j >= kept_) return;
  const double* const known = known_.data() + j * size_;
  // Into the second cache: the first has better things to hold.
  for (int64_t i = 0; i < size_; i += kDoublesPerCacheLine) __builtin_prefetch(known + i, 0, 2);
}

}  // namespace gapa
