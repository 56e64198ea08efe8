#include "gapa_activation/reduced.h"

#include <Eigen/QR>
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "scratch.h"

namespace gapa {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Products of two norms up to here stay far from the end of float32.
constexpr double kLargestNorm = 1e18;
// Fewer numbers than this are scanned in no time anyway.
constexpr int64_t kLeastNumbers = 1 << 14;
// Directions and the rest: whole cache lines of float32 per panel for every instruction set.
constexpr int64_t kWidths[] = {8, 16, 24, 32, 48, 64};
constexpr int64_t kSampleNumbers = 1 << 18, kLeastSample = 192, kMostSample = 1024;
constexpr int kIterations = 4;
constexpr int64_t kTrialQueries = 32, kTrialPoints = 2048;
// What the exact distance of one candidate costs, in multiply-adds of the scan per axis.
constexpr double kCostOfCandidate = 16;
// The share of full cost from which on it is not worth the trouble.
constexpr double kWorthwhile = 0.7;
// Points that a query sees before it has a limit, as a multiple of k.
constexpr int64_t kHeadPerNeighbour = 64, kLeastHead = 128;
// Candidates for which a query has room behind that.
constexpr int64_t kRoomPerNeighbour = 3, kLeastRoom = 256;
constexpr int kBisections = 40;

int64_t lanes() { return simd::kernels().lanes; }
int64_t panel_count(int64_t points) { return (points + lanes() - 1) / lanes(); }

/// ‖u − its part in the directions‖, not too small.
double norm_of_rest(double squared, const double* along, int64_t directions) {
  double rest = squared;
  for (int64_t r = 0; r < directions; ++r) rest -= along[r] * along[r];
  return std::sqrt(std::max(rest, 0.0) + 1e-12 * squared) * (1 + 1e-6);
}

}  // namespace

std::unique_ptr<const ReducedPoints> ReducedPoints::make(const float* points, int64_t count,
                                                         int64_t dim, int64_t k) {
  if (count < 2 || count * dim < kLeastNumbers || dim < 2 * kWidths[0]) return nullptr;
  std::unique_ptr<ReducedPoints> made(new ReducedPoints(points, count, dim));
  if (!(made->largest_norm_ < kLargestNorm)) return nullptr;  // also for a NaN
  const int64_t most = *std::max_element(std::begin(kWidths), std::end(kWidths));
  made->find_directions(std::min(most, dim / 2) - 1);
  const int64_t width = made->best_width(k);
  if (width == 0) return nullptr;
  made->pack(width);
  return made;
}

ReducedPoints::ReducedPoints(const float* points, int64_t count, int64_t dim)
    : points_(points), count_(count), dim_(dim), centre_(dim) {
  std::vector<double> sums(dim);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t axis = 0; axis < dim; ++axis) sums[axis] += points[row * dim + axis];
  }
  for (int64_t axis = 0; axis < dim; ++axis) centre_[axis] = static_cast<float>(sums[axis] / count);
  const std::vector<double> centre(centre_.begin(), centre_.end());
  for (int64_t row = 0; row < count; ++row) {
    const double squared = simd::kernels().squared_distance(points + row * dim, centre.data(), dim);
    largest_norm_ = squared <= largest_norm_ * largest_norm_ ? largest_norm_ : std::sqrt(squared);
  }
}

void ReducedPoints::find_directions(int64_t most) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int64_t wanted = std::clamp(kSampleNumbers / dim_, kLeastSample, kMostSample);
  const int64_t sample = std::min(count_, wanted), directions = std::min(most, sample);
  Matrix rows(sample, dim_);
  for (int64_t i = 0; i < sample; ++i) {
    const float* const row = points_ + i * count_ / sample * dim_;
    for (int64_t axis = 0; axis < dim_; ++axis) {
      rows(i, axis) = static_cast<double>(row[axis]) - centre_[axis];
    }
  }
  // Orthogonal iteration, from points far apart in the order of the rows.
  Matrix basis(dim_, directions);
  for (int64_t r = 0; r < directions; ++r) {
    basis.col(r) = rows.row(r * sample / directions).transpose();
  }
  for (int step = 0; step < kIterations; ++step) {
    const Matrix spread = rows.transpose() * (rows * basis);
    basis =
        Eigen::HouseholderQR<Matrix>(spread).householderQ() * Matrix::Identity(dim_, directions);
  }
  basis_.resize(directions * dim_);
  Eigen::Map<Matrix>(basis_.data(), directions, dim_) = basis.transpose();
}

int64_t ReducedPoints::best_width(int64_t k) const {
  const simd::Kernels& kernels = simd::kernels();
  const int64_t directions = basis_.size() / dim_;
  const int64_t trials = std::min(count_, kTrialPoints), queries = std::min(trials, kTrialQueries);
  const double share = static_cast<double>(trials) / count_;
  const int64_t near = std::clamp<int64_t>(std::llround(k * share), 1, trials - 1);
  std::vector<double> along(trials * directions), norms(trials), room(dim_), wide(dim_);
  const auto point = [&](int64_t i) { return points_ + i * count_ / trials * dim_; };
  for (int64_t i = 0; i < trials; ++i) {
    norms[i] = kernels.projected(point(i), centre_.data(), basis_.data(), directions, dim_,
                                 room.data(), along.data() + i * directions);
  }
  std::vector<double> exact(trials);
  std::vector<std::pair<double, int64_t>> bounds(trials);
  constexpr int64_t kOptions = std::end(kWidths) - std::begin(kWidths);
  double candidates[kOptions] = {};
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t self = q * trials / queries;
    std::copy_n(point(self), dim_, wide.begin());
    for (int64_t i = 0; i < trials; ++i) {
      exact[i] = kernels.squared_distance(point(i), wide.data(), dim_);
    }
    const double* const mine = along.data() + self * directions;
    for (int64_t option = 0; option < kOptions && kWidths[option] <= directions + 1; ++option) {
      const int64_t used = kWidths[option] - 1;
      const double rest = norm_of_rest(norms[self], mine, used);
      for (int64_t i = 0; i < trials; ++i) {
        const double* const other = along.data() + i * directions;
        const double apart = rest - norm_of_rest(norms[i], other, used);
        double bound = apart * apart;
        for (int64_t r = 0; r < used; ++r) bound += (mine[r] - other[r]) * (mine[r] - other[r]);
        bounds[i] = {bound, i};
      }
      std::swap(bounds[self], bounds.back());  // not among those that are compared
      const auto end = bounds.end() - 1;
      std::nth_element(bounds.begin(), bounds.begin() + near - 1, end);
      double limit = 0;
      for (int64_t i = 0; i < near; ++i) limit = std::max(limit, exact[bounds[i].second]);
      candidates[option] +=
          std::count_if(bounds.begin(), end, [&](const auto& b) { return b.first <= limit; }) -
          near;
    }
  }
  int64_t best = 0;
  double least = kWorthwhile * count_ * dim_;
  for (int64_t option = 0; option < kOptions && kWidths[option] <= directions + 1; ++option) {
    // The k that look nearest are compared exactly to know the limit, and again to be ranked.
    const double each = candidates[option] / queries / share + (k > 1 ? 2 * k : 1);
    const double cost =
        static_cast<double>(kWidths[option]) * (count_ + dim_) + kCostOfCandidate * dim_ * each;
    if (cost < least) {
      least = cost;
      best = kWidths[option];
    }
  }
  return best;
}

void ReducedPoints::pack(int64_t width) {
  const int64_t directions = width - 1, panels = panel_count(count_);
  width_ = width;
  basis_.resize(directions * dim_);
  basis_.shrink_to_fit();
  coordinates_ = AlignedArray<float>(panels * lanes() * width);
  half_norms_ = AlignedArray<float>(panels * lanes());
  std::vector<double> room(dim_), along(directions);
  for (int64_t row = 0; row < panels * lanes(); ++row) {
    float* const to = coordinates_.data() + row / lanes() * lanes() * width + row % lanes();
    double squared = 0, rest = 0;
    if (row < count_) {
      squared = simd::kernels().projected(points_ + row * dim_, centre_.data(), basis_.data(),
                                          directions, dim_, room.data(), along.data());
      rest = norm_of_rest(squared, along.data(), directions);
    }
    for (int64_t r = 0; r < directions; ++r) {
      to[r * lanes()] = row < count_ ? static_cast<float>(along[r]) : 0;
    }
    to[directions * lanes()] = static_cast<float>(rest);
    half_norms_[row] = row < count_ ? static_cast<float>(squared / 2) : kInfinity;
  }
}

/// The queries of one call and what is known of each so far.
class ReducedPoints::Search {
 public:
  Search(const ReducedPoints& points, const std::vector<const float*>& queries, int64_t k)
      : points_(points),
        k_(k),
        tile_points_(lanes() * simd::kernels().panels),
        room_(kRoomPerNeighbour * k + kLeastRoom + 2 * tile_points_),
        seen_(queries.size()),
        rows_(queries.size()),
        lists_(queries.size()),
        projected_(queries.size() * points.width_),
        scores_(queries.size() * room_),
        numbers_(queries.size() * room_) {
    const int64_t dim = points.dim_, directions = points.width_ - 1;
    std::vector<double> along(directions);
    wide_.resize(dim);
    for (size_t i = 0; i < queries.size(); ++i) {
      Seen& query = seen_[i];
      query.row = queries[i];
      query.squared =
          simd::kernels().projected(query.row, points.centre_.data(), points.basis_.data(),
                                    directions, dim, wide_.data(), along.data());
      query.settled = query.squared < kLargestNorm * kLargestNorm;
      query.slack = slack(std::sqrt(query.squared));
      float* const to = projected_.data() + i * points.width_;
      for (int64_t r = 0; r < directions; ++r) to[r] = static_cast<float>(along[r]);
      to[directions] = static_cast<float>(norm_of_rest(query.squared, along.data(), directions));
      if (!query.settled) std::fill_n(to, points.width_, 0.0f);
      rows_[i] = to;
      lists_[i] = {scores_.data() + i * room_, numbers_.data() + i * room_, 0,
                   query.settled ? FLT_MAX : -kInfinity};
    }
  }

  void over(int64_t begin, int64_t end) {
    const int64_t tile = tile_points_;
    // Up to a panel's end, so that no panel is looked at twice.
    const int64_t wanted = begin + std::max(kLeastHead, kHeadPerNeighbour * k_);
    const int64_t head = wanted + 2 * tile >= end ? end : wanted / lanes() * lanes();
    first_limits(begin, head, end);
    for (int64_t first = head; first < end;) {
      const int64_t last = std::min(end, (first / lanes() + simd::kernels().panels) * lanes());
      for (size_t i = 0; i < lists_.size(); ++i) {
        if (room_ - lists_[i].count < 2 * tile) tighten(i, room_ / 2);
      }
      scan(first, last, rows_.data(), pointers(lists_), rows_.size());
      first = last;
    }
    if (head < end) {
      for (size_t i = 0; i < lists_.size(); ++i) {
        if (lists_[i].count > k_) tighten(i, room_);
      }
    }
  }

  bool finish(int64_t i, std::vector<int64_t>* rows) const {
    rows->assign(lists_[i].rows, lists_[i].rows + (seen_[i].settled ? lists_[i].count : 0));
    return seen_[i].settled;
  }

 private:
  struct Seen {
    const float* row;
    double squared;  ///< ‖q‖², centred
    float slack;     ///< that rounding may have added to a score
    bool settled;    ///< false: too many candidates
  };

  /// The first points, of which all are candidates until k are known exactly. A tile of queries at
  /// a time, so that this much room is needed once.
  void first_limits(int64_t begin, int64_t end, int64_t last) {
    const int64_t room = end - begin + 2 * tile_points_, together = simd::kernels().queries;
    Scratch<float> scores(together * room);
    Scratch<int32_t> numbers(together * room);
    const int64_t count = lists_.size(), fits = end == last ? room_ : room_ / 2;
    for (int64_t first = 0; first < count; first += together) {
      const int64_t tile = std::min(together, count - first);
      std::vector<simd::Shortlist> own(lists_.begin() + first, lists_.begin() + first + tile);
      for (int64_t q = 0; q < tile; ++q) {
        lists_[first + q].scores = scores.data() + q * room;
        lists_[first + q].rows = numbers.data() + q * room;
      }
      std::vector<simd::Shortlist*> lists(tile);
      for (int64_t q = 0; q < tile; ++q) lists[q] = &lists_[first + q];
      scan(begin, end, rows_.data() + first, lists.data(), tile);
      for (int64_t q = 0; q < tile; ++q) {
        simd::Shortlist& list = lists_[first + q];
        tighten(first + q, fits);
        std::copy_n(list.scores, list.count, own[q].scores);
        std::copy_n(list.rows, list.count, own[q].rows);
        list.scores = own[q].scores;
        list.rows = own[q].rows;
      }
    }
  }

  /// Lets go of the candidates that are beyond the exact distances of the k that look nearest;
  /// gives up on the query if more than `most` remain.
  void tighten(int64_t i, int64_t most) {
    simd::Shortlist& list = lists_[i];
    Seen& query = seen_[i];
    if (list.count > k_) {
      const float looks_near = near_enough(list);
      const float* const points = points_.points_;
      std::copy_n(query.row, points_.dim_, wide_.begin());
      positions_.resize(list.count);
      const int64_t near =
          simd::kernels().positions_up_to(list.scores, list.count, looks_near, positions_.data());
      exact_.clear();
      for (int64_t c = 0; c < near; ++c) {
        const int64_t row = list.rows[positions_[c]];
        exact_.push_back(simd::kernels().squared_distance(points + row * points_.dim_, wide_.data(),
                                                          points_.dim_));
      }
      std::nth_element(exact_.begin(), exact_.begin() + k_ - 1, exact_.end());
      const double score = 0.5 * (exact_[k_ - 1] - query.squared);
      list.limit = std::min(list.limit, static_cast<float>(score) + query.slack);
      zeros_.resize(list.count);
      simd::kernels().keep(&list, zeros_.data(), list.limit);
    }
    if (list.count > most) {
      query.settled = false;
      list.count = 0;
      list.limit = -kInfinity;
    }
  }

  /// A number that at least k scores do not exceed, and few more.
  float near_enough(const simd::Shortlist& list) const {
    const simd::Range range = simd::kernels().range(list.scores, list.count);
    float low = range.least, high = k_ == 1 ? low : range.largest;
    for (int step = 0; step < kBisections; ++step) {
      const float middle = low + (high - low) / 2;
      if (!(middle < high)) break;
      const int64_t within = simd::kernels().count_up_to(list.scores, list.count, middle);
      (within >= k_ ? high : low) = middle;
      if (within >= k_ && within <= k_ + k_ / 8) break;
    }
    return high;
  }

  /// Compares queries with the points of rows begin … end-1.
  void scan(int64_t begin, int64_t end, const float* const* rows, simd::Shortlist* const* lists,
            int64_t count) const {
    const simd::Kernels& kernels = simd::kernels();
    const int64_t last = (end - 1) / lanes();
    for (int64_t panel = begin / lanes(); panel <= last; panel += kernels.panels) {
      const simd::Panels panels = {points_.coordinates_.data() + panel * points_.width_ * lanes(),
                                   points_.half_norms_.data() + panel * lanes(),
                                   std::min<int64_t>(kernels.panels, last + 1 - panel),
                                   points_.width_,
                                   panel * lanes(),
                                   begin,
                                   end};
      int64_t first = 0;
      for (int64_t tile = kernels.queries; tile > 0; tile /= 2) {
        for (; count - first >= tile; first += tile) {
          kernels.scan(panels, {rows + first, lists + first, tile});
        }
      }
    }
  }

  simd::Shortlist* const* pointers(std::vector<simd::Shortlist>& lists) {
    if (pointers_.empty()) {
      for (simd::Shortlist& list : lists) pointers_.push_back(&list);
    }
    return pointers_.data();
  }

  /// p₁, q₁ and the norms are rounded to float32, then width products are summed.
  float slack(double query_norm) const {
    const double terms = points_.width_ + 12, p = points_.largest_norm_, q = query_norm;
    return static_cast<float>(1.2 * terms * 0x1p-24 * p * (0.5 * p + q) +
                              terms * FLT_MIN * (1 + p + q) +
                              0x1p-23 * 0.5 * (p + q) * (p + q));  // of the limit itself
  }

  const ReducedPoints& points_;
  int64_t k_, tile_points_, room_;
  std::vector<Seen> seen_;              ///< (n)
  std::vector<const float*> rows_;      ///< (n) of width numbers
  std::vector<simd::Shortlist> lists_;  ///< (n)
  std::vector<simd::Shortlist*> pointers_;
  Scratch<float> projected_;          ///< (n, width)
  Scratch<float> scores_;             ///< (n, room)
  Scratch<int32_t> numbers_;          ///< (n, room)
  std::vector<double> wide_, exact_;  ///< workspace
  std::vector<float> zeros_;
  std::vector<int32_t> positions_;
};

void ReducedPoints::search(const std::vector<const float*>& queries, int64_t k, int64_t begin,
                           int64_t end, std::vector<std::vector<int64_t>>* rows,
                           std::vector<int32_t>* unsettled) const {
  if (begin >= end) return;
  Search search(*this, queries, std::min(k, end - begin));
  search.over(begin, end);
  for (size_t i = 0; i < queries.size(); ++i) {
    if (!search.finish(i, &(*rows)[i])) unsettled->push_back(static_cast<int32_t>(i));
  }
}

}  // namespace gapa
