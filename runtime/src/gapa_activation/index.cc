// The only file that knows FAISS.
//
// Its objects are assembled in memory from checked tensors. faiss::read_index is never called: it
// crashes on corrupt bytes. Points are read where onnxruntime keeps them; scans have a packed copy.
#include "gapa_activation/index.h"

#include <faiss/IndexFlat.h>
#include <faiss/IndexIVFPQ.h>
#include <faiss/impl/AuxIndexStructures.h>
#include <faiss/impl/DistanceComputer.h>
#include <faiss/impl/HNSW.h>
#include <faiss/utils/Heap.h>

#include <algorithm>
#include <numeric>

#include "gapa_activation/ranking.h"
#include "gapa_activation/reduced.h"
#include "gapa_activation/scan.h"
#include "simd/kernels.h"

namespace gapa {
namespace {

using Queries = std::vector<const float*>;
using Rows = std::vector<std::vector<int64_t>>;

// Points whose float32 distances are equal up to rounding may change places around the k-th; with
// these few more the double-precision ranking behind a FAISS scan sees both.
constexpr int64_t kTieMargin = 8;

class FlatIndex : public Index {
 public:
  /// Made for searches of the k nearest.
  FlatIndex(const Parameters& parameters, const Tensor<float>& points, int64_t k)
      : points_(points.data),
        packed_(points.data, parameters.count, parameters.dim),
        reduced_(ReducedPoints::make(points.data, parameters.count, parameters.dim, k)) {}

  /// Beyond the caches a block should be large, as each one reads all points. Where there are too
  /// few queries for that, threads share the points instead.
  Split split(int64_t queries) const override {
    const int64_t width = reduced_ ? reduced_->width() : packed_.dim();
    const int64_t parts = packed_.count() * width / kSmallestPart;
    if (parts < 2) return Index::split(queries);
    if (queries > kFewQueries) return {std::clamp<int64_t>(queries / 4, kFewQueries, 128), 1};
    return {queries, std::min<int64_t>(parts, queries <= 4 ? 16 : 4)};
  }

  void search(const Queries& queries, int64_t k, int64_t part, int64_t parts,
              Rows* rows) const override {
    const int64_t begin = packed_.count() * part / parts;
    const int64_t end = packed_.count() * (part + 1) / parts;
    if (!reduced_) return scan(queries, k, begin, end, rows);
    std::vector<int32_t> unsettled;
    reduced_->search(queries, k, begin, end, rows, &unsettled);
    if (unsettled.empty()) return;
    Queries others;
    for (const int32_t i : unsettled) others.push_back(queries[i]);
    Rows found(others.size());
    scan(others, k, begin, end, &found);
    for (size_t i = 0; i < unsettled.size(); ++i) (*rows)[unsettled[i]] = std::move(found[i]);
  }

  const float* point(int64_t row, float*) const override { return points_ + row * packed_.dim(); }

 private:
  static constexpr int64_t kSmallestPart = 1 << 19;  // numbers: 2 MB
  static constexpr int64_t kFewQueries = 32;

  void scan(const Queries& queries, int64_t k, int64_t begin, int64_t end, Rows* rows) const {
    Scan scan(packed_, queries, k);
    scan.over(begin, end);
    for (size_t i = 0; i < queries.size(); ++i) scan.finish(i, &(*rows)[i]);
  }

  const float* points_;  ///< (M, d)
  PackedPoints packed_;
  std::unique_ptr<const ReducedPoints> reduced_;  ///< nullptr where it would not pay
};

/// What IVF and IVFPQ share: rows sorted by list, and the lists of a query.
class Coarse {
 public:
  Coarse(const Parameters& parameters, const Lists& lists)
      : centroids_(lists.centroids.data),
        packed_(lists.centroids.data, lists.centroids.shape[0], parameters.dim),
        offsets_(lists.list_offsets.data, lists.list_offsets.data + lists.list_offsets.size),
        nprobe_(lists.nprobe) {}

  /// Per query the lists of the nearest centroids, by exact distance, nearest first.
  std::vector<std::vector<Neighbour>> probe(const Queries& queries) const {
    std::vector<std::vector<Neighbour>> lists(queries.size());
    each_probe(queries, [&](size_t i, const std::vector<int64_t>& rows) {
      for (const int64_t list : rows) lists[i].push_back({0, list, centroid(list)});
      const std::vector<double> query(queries[i], queries[i] + packed_.dim());
      keep_nearest(query.data(), packed_.dim(), nprobe_, &lists[i]);
    });
    return lists;
  }

  /// The queries of each list, list by list: list l has numbers[starts[l]] … up to starts[l + 1].
  struct Groups {
    std::vector<int32_t> numbers;  ///< (n · nprobe)
    std::vector<int64_t> starts;   ///< (L + 1)
  };
  Groups group(const Queries& queries) const {
    const int64_t count = queries.size();
    std::vector<int32_t> lists(count * nprobe_);
    Groups groups{std::vector<int32_t>(lists.size()), std::vector<int64_t>(packed_.count() + 1)};
    each_probe(queries, [&](size_t i, const std::vector<int64_t>& rows) {
      if (static_cast<int64_t>(rows.size()) == nprobe_) {
        std::copy(rows.begin(), rows.end(), lists.begin() + i * nprobe_);
        return;
      }
      std::vector<Neighbour> nearest;  // too near to call in float32
      for (const int64_t list : rows) nearest.push_back({0, list, centroid(list)});
      const std::vector<double> query(queries[i], queries[i] + packed_.dim());
      keep_nearest(query.data(), packed_.dim(), nprobe_, &nearest);
      for (int64_t p = 0; p < nprobe_; ++p) {
        lists[i * nprobe_ + p] = static_cast<int32_t>(nearest[p].row);
      }
    });
    for (const int32_t list : lists) ++groups.starts[list + 1];
    std::partial_sum(groups.starts.begin(), groups.starts.end(), groups.starts.begin());
    std::vector<int64_t> next(groups.starts.begin(), groups.starts.end() - 1);
    for (size_t i = 0; i < lists.size(); ++i) {
      groups.numbers[next[lists[i]]++] = static_cast<int32_t>(i / nprobe_);
    }
    return groups;
  }

  const float* centroid(int64_t list) const { return centroids_ + list * packed_.dim(); }
  int64_t begin(int64_t list) const { return offsets_[list]; }
  int64_t end(int64_t list) const { return offsets_[list + 1]; }
  int64_t rows() const { return offsets_.back(); }

  /// The list that holds a row: the last one that starts at or before it and is not empty.
  int64_t list_of(int64_t row) const {
    return std::upper_bound(offsets_.begin(), offsets_.end(), row) - offsets_.begin() - 1;
  }

 private:
  /// found(i, lists among which the nearest of query i are)
  template <typename Found>
  void each_probe(const Queries& queries, const Found& found) const {
    std::vector<int64_t> rows;
    Scan scan(packed_, queries, nprobe_);
    scan.over(0, packed_.count());
    for (size_t i = 0; i < queries.size(); ++i) {
      scan.finish(i, &rows);
      found(i, rows);
    }
  }

  const float* centroids_;  ///< (L, d)
  PackedPoints packed_;
  std::vector<int64_t> offsets_;  ///< (L + 1)
  int64_t nprobe_;
};

class IvfIndex : public Index {
 public:
  IvfIndex(const Parameters& parameters, const Tensor<float>& points, const Lists& lists)
      : coarse_(parameters, lists),
        points_(points.data),
        packed_(points.data, parameters.count, parameters.dim) {}

  /// Queries that look into the same list are compared with it together.
  Split split(int64_t queries) const override {
    return {std::clamp<int64_t>(queries / 4, 1, kMostQueries), 1};
  }

  void search(const Queries& queries, int64_t k, int64_t, int64_t, Rows* rows) const override {
    const Coarse::Groups groups = coarse_.group(queries);
    Scan scan(packed_, queries, k);
    for (size_t list = 0; list + 1 < groups.starts.size(); ++list) {
      const int64_t first = groups.starts[list];
      scan.over(coarse_.begin(list), coarse_.end(list), groups.numbers.data() + first,
                groups.starts[list + 1] - first);
    }
    for (size_t i = 0; i < queries.size(); ++i) scan.finish(i, &(*rows)[i]);
  }

  const float* point(int64_t row, float*) const override { return points_ + row * packed_.dim(); }

 private:
  static constexpr int64_t kMostQueries = 64;

  Coarse coarse_;
  const float* points_;  ///< (M, d)
  PackedPoints packed_;
};

/// FAISS's scanner goes over our codes, list by list, so a result is (list, offset) and no array of
/// ids is needed. One query at a time: what FAISS computes must not depend on the batch.
class IvfpqIndex : public Index {
 public:
  IvfpqIndex(const Parameters& parameters, const IvfpqParts& parts)
      : coarse_(parameters, parts.lists),
        quantizer_(parameters.dim),
        index_(&quantizer_, parameters.dim, parts.lists.centroids.shape[0], parts.codes.shape[1],
               /*nbits_per_idx=*/8),
        codes_(parts.codes.data) {
    quantizer_.add(parts.lists.centroids.shape[0], parts.lists.centroids.data);
    std::copy_n(parts.codebooks.data, parts.codebooks.size, index_.pq.centroids.data());
    index_.by_residual = true;
    // The table would need L·m·256 floats, more than the codes themselves.
    index_.use_precomputed_table = -1;
    index_.is_trained = true;
  }

  void search(const Queries& queries, int64_t k, int64_t, int64_t, Rows* rows) const override {
    const int64_t count = std::min(k + kTieMargin, coarse_.rows());
    std::vector<float> distances(count);
    const auto lists = coarse_.probe(queries);
    for (size_t i = 0; i < queries.size(); ++i) {
      std::vector<int64_t>& ids = (*rows)[i];
      ids.resize(count);
      const std::unique_ptr<faiss::InvertedListScanner> scanner(
          index_.get_InvertedListScanner(/*store_pairs=*/true, /*sel=*/nullptr));
      scanner->set_query(queries[i]);
      faiss::maxheap_heapify(count, distances.data(), ids.data());
      for (const Neighbour& list : lists[i]) {
        const int64_t begin = coarse_.begin(list.row);
        scanner->set_list(list.row, static_cast<float>(list.squared_distance));
        scanner->scan_codes(coarse_.end(list.row) - begin, codes_ + begin * index_.code_size,
                            nullptr, distances.data(), ids.data(), count);
      }
      ids.erase(std::remove_if(ids.begin(), ids.end(), [](int64_t id) { return id < 0; }),
                ids.end());
      for (int64_t& id : ids) id = coarse_.begin(id >> 32) + (id & 0xffffffff);
    }
  }

  /// An inducing point of this kind *is* its decoded code: centroid plus residual, in float32.
  const float* point(int64_t row, float* scratch) const override {
    index_.pq.decode(codes_ + row * index_.code_size, scratch);
    const float* centroid = coarse_.centroid(coarse_.list_of(row));
    for (int64_t i = 0; i < index_.d; ++i) scratch[i] = centroid[i] + scratch[i];
    return scratch;
  }

  bool decodes() const override { return true; }

 private:
  Coarse coarse_;
  faiss::IndexFlatL2 quantizer_;  ///< FAISS takes residuals to its centroids
  faiss::IndexIVFPQ index_;
  const uint8_t* codes_;  ///< (M, m)
};

/// The points, as the graph asks for distances; there is no copy of them.
class Distances : public faiss::DistanceComputer {
 public:
  Distances(const float* points, int64_t dim) : points_(points), dim_(dim) {}

  void set_query(const float* x) override { query_ = x; }
  float operator()(idx_t row) override { return distance_(query_, points_ + row * dim_, dim_); }
  float symmetric_dis(idx_t a, idx_t b) override {
    return distance_(points_ + a * dim_, points_ + b * dim_, dim_);
  }

 private:
  const float* points_;  ///< (M, d)
  int64_t dim_;
  const float* query_ = nullptr;
  float (*distance_)(const float*, const float*, int64_t) = simd::kernels().rough_distance;
};

/// The graph is asked itself: an exception that leaves FAISS's search of an index, such as where
/// memory runs out, ends the process, because it leaves a parallel region.
class HnswIndex : public Index {
 public:
  HnswIndex(const Parameters& parameters, const HnswParts& parts)
      : points_(parts.points.data), count_(parameters.count), dim_(parameters.dim) {
    const int32_t* levels = parts.levels.data;
    const int highest = levels[parts.entry_point];
    graph_.levels.assign(levels, levels + parameters.count);
    graph_.cum_nneighbor_per_level.assign(1, 0);
    for (int level = 0; level < highest; ++level) {
      graph_.cum_nneighbor_per_level.push_back((level + 2) * static_cast<int>(parts.degree));
    }
    graph_.offsets.assign(1, 0);
    graph_.offsets.reserve(parameters.count + 1);
    for (int64_t row = 0; row < parameters.count; ++row) {
      graph_.offsets.push_back(graph_.offsets.back() + (levels[row] + 1) * parts.degree);
    }
    graph_.neighbors.resize(parts.links.size);
    std::copy_n(parts.links.data, parts.links.size, graph_.neighbors.begin());
    graph_.entry_point = static_cast<int>(parts.entry_point);
    graph_.max_level = highest - 1;
    // More candidates than points are never kept.
    graph_.efSearch =
        static_cast<int>(std::min(std::max(parts.ef, parameters.k), parameters.count));
  }

  void search(const Queries& queries, int64_t k, int64_t, int64_t, Rows* rows) const override {
    std::vector<float> distances(k);
    faiss::VisitedTable visited(static_cast<int>(count_));
    Distances points(points_, dim_);
    for (size_t i = 0; i < queries.size(); ++i) {
      std::vector<int64_t>& ids = (*rows)[i];
      ids.resize(k);
      points.set_query(queries[i]);
      faiss::maxheap_heapify(k, distances.data(), ids.data());
      graph_.search(points, static_cast<int>(k), ids.data(), distances.data(), visited);
      ids.erase(std::remove_if(ids.begin(), ids.end(), [](int64_t id) { return id < 0; }),
                ids.end());
    }
  }

  const float* point(int64_t row, float*) const override { return points_ + row * dim_; }

 private:
  const float* points_;  ///< (M, d)
  int64_t count_, dim_;
  faiss::HNSW graph_;
};

}  // namespace

Split Index::split(int64_t queries) const {
  // Enough tasks for the threads, enough queries in each for its workspace to pay off.
  return {std::clamp<int64_t>(queries / 8, 1, 32), 1};
}

std::unique_ptr<Index> make_index(const Parameters& parameters) {
  struct Maker {
    const Parameters& parameters;
    std::unique_ptr<Index> operator()(const FlatParts& parts) const {
      return std::make_unique<FlatIndex>(parameters, parts.points, parameters.k);
    }
    std::unique_ptr<Index> operator()(const IvfParts& parts) const {
      return std::make_unique<IvfIndex>(parameters, parts.points, parts.lists);
    }
    std::unique_ptr<Index> operator()(const IvfpqParts& parts) const {
      return std::make_unique<IvfpqIndex>(parameters, parts);
    }
    std::unique_ptr<Index> operator()(const HnswParts& parts) const {
      return std::make_unique<HnswIndex>(parameters, parts);
    }
    std::unique_ptr<Index> operator()(const LocalParts& parts) const {
      if (parts.lists.nprobe == parts.lists.centroids.shape[0]) {
        return std::make_unique<FlatIndex>(parameters, parts.points, /*k=*/1);
      }
      return std::make_unique<IvfIndex>(parameters, parts.points, parts.lists);
    }
  };
  return std::visit(Maker{parameters}, parameters.index);
}

}  // namespace gapa
