// Nearest-neighbour search over the inducing points. FAISS lives behind this interface.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gapa_activation/parameters.h"

namespace gapa {

/// How a batch is best shared out over threads.
struct Split {
  int64_t block;  ///< queries that are searched for together
  int64_t parts;  ///< of the points, each a task of its own; more than 1 for one block only
};

/// A built index. Const methods may be called from many threads at once.
class Index {
 public:
  virtual ~Index() = default;

  virtual Split split(int64_t queries) const;

  /// Writes to rows[i] the points of the given part that may be among the k nearest of query i,
  /// each once and in any order: all that the kind of index can reach for, so that what the exact
  /// distances pick from all parts does not depend on the other queries.
  virtual void search(const std::vector<const float*>& queries, int64_t k, int64_t part,
                      int64_t parts, std::vector<std::vector<int64_t>>* rows) const = 0;

  /// Inducing point `row` (0 ≤ row < M), d numbers: in place, or decoded into the scratch space.
  virtual const float* point(int64_t row, float* scratch) const = 0;

  /// True if point() writes to the scratch space.
  virtual bool decodes() const { return false; }
};

/// The index may refer to the tensors of the (checked) parameters for as long as it lives.
std::unique_ptr<Index> make_index(const Parameters& parameters);

}  // namespace gapa
