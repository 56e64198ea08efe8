// The only file that knows FAISS.
//
// The objects are assembled in memory from checked tensors. faiss::read_index is never called: it
// crashes on corrupt bytes. Inducing points are held once, by FAISS or in the one array that FAISS
// scans.
#include "gapa_activation/index.h"

#include <faiss/IndexFlat.h>
#include <faiss/IndexHNSW.h>
#include <faiss/IndexIVFFlat.h>
#include <faiss/IndexIVFPQ.h>
#include <faiss/utils/Heap.h>

#include <algorithm>
#include <vector>

namespace gapa {
namespace {

// Points whose float32 distances are equal up to rounding may change places around the k-th; with
// these few more the double-precision ranking behind the search sees both.
constexpr int64_t kTieMargin = 8;

class FlatIndex : public Index {
 public:
  FlatIndex(const Parameters& parameters, const FlatParts& parts) : index_(parameters.dim) {
    index_.add(parameters.count, parts.points.data);
  }

  int64_t candidates(int64_t k) const override { return std::min(k + kTieMargin, rows()); }

  void search(const float* query, int64_t count, int64_t* ids) const override {
    std::vector<float> distances(count);
    index_.search(1, query, count, distances.data(), ids);
  }

  void point(int64_t row, float* out) const override {
    std::copy_n(index_.get_xb() + row * index_.d, index_.d, out);
  }

 private:
  int64_t rows() const { return index_.ntotal; }

  faiss::IndexFlatL2 index_;
};

/// IVFFlat and IVFPQ: FAISS's scanner of the kind goes over our rows, which are sorted by list, so
/// a result is (list, offset) and no array of ids is needed.
class ListIndex : public Index {
 public:
  int64_t candidates(int64_t k) const override { return std::min(k + kTieMargin, offsets_.back()); }

  void search(const float* query, int64_t count, int64_t* ids) const override {
    std::vector<float> list_distances(nprobe_), distances(count);
    std::vector<int64_t> lists(nprobe_);
    quantizer_.search(1, query, nprobe_, list_distances.data(), lists.data());

    const std::unique_ptr<faiss::InvertedListScanner> scanner(
        ivf().get_InvertedListScanner(/*store_pairs=*/true));
    scanner->set_query(query);
    faiss::maxheap_heapify(count, distances.data(), ids);
    for (int64_t probe = 0; probe < nprobe_; ++probe) {
      const int64_t list = lists[probe];
      if (list < 0) continue;  // the distance to its centroid overflowed float32
      const int64_t begin = offsets_[list];
      scanner->set_list(list, list_distances[probe]);
      scanner->scan_codes(offsets_[list + 1] - begin, rows() + begin * ivf().code_size, nullptr,
                          distances.data(), ids, count);
    }
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] >= 0) ids[i] = offsets_[ids[i] >> 32] + (ids[i] & 0xffffffff);
    }
  }

 protected:
  ListIndex(const Parameters& parameters, const Lists& lists)
      : quantizer_(parameters.dim),
        offsets_(lists.list_offsets.data, lists.list_offsets.data + lists.list_offsets.size),
        nprobe_(lists.nprobe) {
    quantizer_.add(lists.centroids.shape[0], lists.centroids.data);
  }

  virtual const faiss::IndexIVF& ivf() const = 0;
  virtual const uint8_t* rows() const = 0;  ///< (M, code_size)

  /// The list that holds a row: the last one that starts at or before it and is not empty.
  int64_t list_of(int64_t row) const {
    return std::upper_bound(offsets_.begin(), offsets_.end(), row) - offsets_.begin() - 1;
  }

  faiss::IndexFlatL2 quantizer_;  ///< over the centroids

 private:
  std::vector<int64_t> offsets_;  ///< (L + 1)
  int64_t nprobe_;
};

class IvfIndex : public ListIndex {
 public:
  IvfIndex(const Parameters& parameters, const IvfParts& parts)
      : ListIndex(parameters, parts.lists),
        index_(&quantizer_, parameters.dim, parts.lists.centroids.shape[0]),
        points_(parts.points.data, parts.points.data + parts.points.size) {}

  void point(int64_t row, float* out) const override {
    std::copy_n(points_.data() + row * index_.d, index_.d, out);
  }

 private:
  const faiss::IndexIVF& ivf() const override { return index_; }
  const uint8_t* rows() const override { return reinterpret_cast<const uint8_t*>(points_.data()); }

  faiss::IndexIVFFlat index_;
  std::vector<float> points_;  ///< (M, d)
};

class IvfpqIndex : public ListIndex {
 public:
  IvfpqIndex(const Parameters& parameters, const IvfpqParts& parts)
      : ListIndex(parameters, parts.lists),
        index_(&quantizer_, parameters.dim, parts.lists.centroids.shape[0], parts.codes.shape[1],
               /*nbits_per_idx=*/8),
        codes_(parts.codes.data, parts.codes.data + parts.codes.size) {
    std::copy_n(parts.codebooks.data, parts.codebooks.size, index_.pq.centroids.data());
    index_.by_residual = true;
    // The table would need L·m·256 floats, more than the codes themselves.
    index_.use_precomputed_table = -1;
    index_.is_trained = true;
  }

  /// An inducing point of this kind *is* its decoded code: centroid plus residual, in float32.
  void point(int64_t row, float* out) const override {
    index_.pq.decode(codes_.data() + row * index_.code_size, out);
    const float* centroid = quantizer_.get_xb() + list_of(row) * index_.d;
    for (int64_t i = 0; i < index_.d; ++i) out[i] = centroid[i] + out[i];
  }

 private:
  const faiss::IndexIVF& ivf() const override { return index_; }
  const uint8_t* rows() const override { return codes_.data(); }

  faiss::IndexIVFPQ index_;
  std::vector<uint8_t> codes_;  ///< (M, m)
};

class HnswIndex : public Index {
 public:
  HnswIndex(const Parameters& parameters, const HnswParts& parts)
      : storage_(parameters.dim), index_(&storage_) {
    storage_.add(parameters.count, parts.points.data);
    index_.ntotal = parameters.count;

    const int32_t* levels = parts.levels.data;
    const int highest = levels[parts.entry_point];
    faiss::HNSW& graph = index_.hnsw;
    graph.levels.assign(levels, levels + parameters.count);
    graph.cum_nneighbor_per_level.assign(1, 0);
    for (int level = 0; level < highest; ++level) {
      graph.cum_nneighbor_per_level.push_back((level + 2) * static_cast<int>(parts.degree));
    }
    graph.offsets.assign(1, 0);
    graph.offsets.reserve(parameters.count + 1);
    for (int64_t row = 0; row < parameters.count; ++row) {
      graph.offsets.push_back(graph.offsets.back() + (levels[row] + 1) * parts.degree);
    }
    graph.neighbors.resize(parts.links.size);
    std::copy_n(parts.links.data, parts.links.size, graph.neighbors.begin());
    graph.entry_point = static_cast<int>(parts.entry_point);
    graph.max_level = highest - 1;
    // More candidates than points are never kept.
    graph.efSearch = static_cast<int>(std::min(std::max(parts.ef, parameters.k), parameters.count));
  }

  int64_t candidates(int64_t k) const override { return k; }

  void search(const float* query, int64_t count, int64_t* ids) const override {
    // FAISS also adds to global counters, unguarded; nobody reads them.
    std::vector<float> distances(count);
    index_.search(1, query, count, distances.data(), ids);
  }

  void point(int64_t row, float* out) const override {
    std::copy_n(storage_.get_xb() + row * storage_.d, storage_.d, out);
  }

 private:
  faiss::IndexFlatL2 storage_;
  faiss::IndexHNSW index_;
};

}  // namespace

std::unique_ptr<Index> make_index(const Parameters& parameters) {
  struct Maker {
    const Parameters& parameters;
    std::unique_ptr<Index> operator()(const FlatParts& parts) const {
      return std::make_unique<FlatIndex>(parameters, parts);
    }
    std::unique_ptr<Index> operator()(const IvfParts& parts) const {
      return std::make_unique<IvfIndex>(parameters, parts);
    }
    std::unique_ptr<Index> operator()(const IvfpqParts& parts) const {
      return std::make_unique<IvfpqIndex>(parameters, parts);
    }
    std::unique_ptr<Index> operator()(const HnswParts& parts) const {
      return std::make_unique<HnswIndex>(parameters, parts);
    }
  };
  return std::visit(Maker{parameters}, parameters.index);
}

}  // namespace gapa
