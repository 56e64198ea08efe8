// The constant inputs of an operator, read once at session load and checked in full.
//
// What comes out of read_parameters() is safe to compute with: every shape fits every other, every
// offset and link is in range, every number is finite. Nothing behind it checks again.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "constants.h"
#include "gapa/ort_abi.h"

namespace gapa {

enum class IndexKind { kFlat, kIvf, kIvfpq, kHnsw, kLocal };

/// The inputs that every kind starts with; the others follow, in the order of the parts below.
enum CommonInput : size_t { kQuery, kK, kLengthScale, kJitter, kFirstOfIndex };

struct FlatParts {
  Tensor<float> points;  ///< (M, d)
};

/// The rows of the points (or codes) are sorted by list.
struct Lists {
  Tensor<float> centroids;       ///< (L, d)
  Tensor<int64_t> list_offsets;  ///< (L + 1): list l is rows list_offsets[l] … list_offsets[l+1]-1
  int64_t nprobe = 0;
};

struct IvfParts {
  Tensor<float> points;  ///< (M, d)
  Lists lists;
};

struct IvfpqParts {
  Tensor<uint8_t> codes;    ///< (M, m)
  Tensor<float> codebooks;  ///< (m, 256, d/m)
  Lists lists;
};

struct HnswParts {
  Tensor<float> points;    ///< (M, d)
  Tensor<int32_t> levels;  ///< (M): levels that a point is on, at least 1
  Tensor<int32_t> links;   ///< (E): per point, 2·degree slots for level 0, degree for each above
  int64_t degree = 0;
  int64_t entry_point = 0;
  int64_t ef = 0;
};

struct LocalParts {
  Tensor<float> points;            ///< (M, d)
  Tensor<int32_t> neighbourhoods;  ///< (M, N)
  Lists lists;
};

struct Parameters {
  int64_t k = 0;
  double length_scale = 0;
  double jitter = 0;
  int64_t dim = 0;    ///< d
  int64_t count = 0;  ///< M
  std::variant<FlatParts, IvfParts, IvfpqParts, HnswParts, LocalParts> index;
};

/// Throws ModelError with a sentence that names the operator and the input.
Parameters read_parameters(const ConstantReader& reader, IndexKind kind);

}  // namespace gapa
