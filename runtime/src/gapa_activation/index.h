// Nearest-neighbour search over the inducing points. FAISS lives behind this interface.
#pragma once

#include <cstdint>
#include <memory>

#include "gapa_activation/parameters.h"

namespace gapa {

/// A built index. Const methods may be called from many threads at once.
///
/// One query at a time, always: FAISS changes its distance formula with the size of a batch, and
/// the answer to a query must not depend on what else is in the batch.
class Index {
 public:
  virtual ~Index() = default;

  /// How many neighbours to ask for so that the exact k nearest are among them although FAISS
  /// ranks by float32 distances: a few more than k where the index scans, k where it walks a graph.
  virtual int64_t candidates(int64_t k) const = 0;

  /// Writes the rows of up to `count` near points to ids, in any order, -1 for each that is
  /// missing.
  virtual void search(const float* query, int64_t count, int64_t* ids) const = 0;

  /// Writes inducing point `row` (0 ≤ row < M) to out, d numbers.
  virtual void point(int64_t row, float* out) const = 0;
};

/// Copies what it needs of the (checked) parameters into FAISS objects.
std::unique_ptr<Index> make_index(const Parameters& parameters);

}  // namespace gapa
