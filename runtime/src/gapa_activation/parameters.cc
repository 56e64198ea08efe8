#include "gapa_activation/parameters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "constants.h"

namespace gapa {
namespace {

// FAISS numbers rows and packs (list, offset) pairs with 32 bits.
constexpr int64_t kMaxPoints = std::numeric_limits<int32_t>::max();
constexpr int64_t kCodesPerBook = 256;

/// Reads what the kinds of index are made of.
class Reader : public ConstantReader {
 public:
  explicit Reader(const ConstantReader& reader) : ConstantReader(reader) {}

  Tensor<float> points(size_t input) const {
    Tensor<float> points = finite(input, 2);
    if (points.shape[0] > kMaxPoints) refuse(input, "has more than 2147483647 rows");
    return points;
  }

  Lists lists(size_t first, int64_t rows, int64_t dim) const {
    const size_t centroids = first, list_offsets = first + 1, nprobe = first + 2;
    Lists lists;
    lists.centroids = finite(centroids, 2);
    const int64_t list_count = lists.centroids.shape[0];
    if (lists.centroids.shape[1] != dim) {
      refuse(centroids, "must have " + std::to_string(dim) +
                            " columns like the points, but has shape " +
                            shape_text(lists.centroids.shape));
    }
    if (list_count > kMaxPoints) refuse(centroids, "has more than 2147483647 rows");
    lists.list_offsets = tensor<int64_t>(list_offsets);
    const Tensor<int64_t>& offsets = lists.list_offsets;
    if (offsets.shape.size() != 1 || offsets.size != list_count + 1) {
      refuse(list_offsets, "must have one entry more than there are centroids, " +
                               std::to_string(list_count + 1) + ", but has shape " +
                               shape_text(offsets.shape));
    }
    if (offsets.data[0] != 0 || offsets.data[list_count] != rows) {
      refuse(list_offsets, "must run from 0 to the number of points, " + std::to_string(rows) +
                               ", but runs from " + std::to_string(offsets.data[0]) + " to " +
                               std::to_string(offsets.data[list_count]));
    }
    for (int64_t l = 0; l < list_count; ++l) {
      if (offsets.data[l] > offsets.data[l + 1]) {
        refuse(list_offsets, "must not decrease, but entry " + std::to_string(l + 1) + " is " +
                                 std::to_string(offsets.data[l + 1]) + " after " +
                                 std::to_string(offsets.data[l]));
      }
    }
    lists.nprobe = integer(nprobe, 1, list_count);
    return lists;
  }

  Tensor<int32_t> neighbourhoods(size_t input, int64_t rows) const {
    Tensor<int32_t> found = filled<int32_t>(input, 2);
    if (found.shape[0] != rows) {
      refuse(input, "must have one row per point, " + std::to_string(rows) + ", but has shape " +
                        shape_text(found.shape));
    }
    for (int64_t i = 0; i < found.size; ++i) {
      if (found.data[i] < 0 || found.data[i] >= rows) {
        refuse(input, "must hold rows of 'points', but element " + std::to_string(i) + " is " +
                          std::to_string(found.data[i]));
      }
    }
    return found;
  }

  IvfpqParts product_quantised() const {
    const size_t codes = kFirstOfIndex, codebooks = codes + 1, centroids = codes + 2;
    IvfpqParts parts;
    parts.codes = filled<uint8_t>(codes, 2);
    if (parts.codes.shape[0] > kMaxPoints) refuse(codes, "has more than 2147483647 rows");
    parts.codebooks = finite(codebooks, 3);
    if (parts.codebooks.shape[0] != parts.codes.shape[1] ||
        parts.codebooks.shape[1] != kCodesPerBook) {
      refuse(codebooks, "must have shape (" + std::to_string(parts.codes.shape[1]) +
                            ", 256, d/m) to fit the codes, but has shape " +
                            shape_text(parts.codebooks.shape));
    }
    const int64_t dim = parts.codebooks.shape[0] * parts.codebooks.shape[2];
    parts.lists = lists(centroids, parts.codes.shape[0], dim);

    float largest[2] = {0, 0};
    const Tensor<float>* summands[2] = {&parts.codebooks, &parts.lists.centroids};
    for (int part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < summands[part]->size; ++i) {
        largest[part] = std::max(largest[part], std::fabs(summands[part]->data[i]));
      }
    }
    if (!std::isfinite(largest[0] + largest[1])) {
      refuse(codebooks, "overflows float32 when added to 'centroids'");
    }
    return parts;
  }

  HnswParts graph() const {
    const size_t levels = kFirstOfIndex + 1, links = levels + 1, degree = levels + 2,
                 entry_point = levels + 3, ef = levels + 4;
    HnswParts parts;
    parts.points = points(kFirstOfIndex);
    const int64_t rows = parts.points.shape[0];
    parts.levels = tensor<int32_t>(levels);
    if (parts.levels.shape.size() != 1 || parts.levels.size != rows) {
      refuse(levels, "must have one entry per point, " + std::to_string(rows) + ", but has shape " +
                         shape_text(parts.levels.shape));
    }
    parts.links = tensor<int32_t>(links);
    if (parts.links.shape.size() != 1) {
      refuse(links, "must have rank 1, but has shape " + shape_text(parts.links.shape));
    }
    const int64_t slots = parts.links.size;
    // FAISS counts the slots of one point with 32 bits.
    parts.degree = integer(degree, 1, std::numeric_limits<int32_t>::max() / 4);
    parts.entry_point = integer(entry_point, 0, rows - 1);
    parts.ef = integer(ef, 1, std::numeric_limits<int64_t>::max());

    const int64_t level_limit = std::numeric_limits<int32_t>::max() / parts.degree - 1;
    int64_t expected_slots = 0, highest = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t level_count = parts.levels.data[row];
      if (level_count < 1 || level_count > level_limit) {
        refuse(levels, "must hold numbers from 1 to " + std::to_string(level_limit) +
                           ", but entry " + std::to_string(row) + " is " +
                           std::to_string(level_count));
      }
      highest = std::max(highest, level_count);
      expected_slots += (level_count + 1) * parts.degree;
      if (expected_slots > slots) break;
    }
    if (expected_slots != slots) {
      refuse(links,
             "has " + std::to_string(slots) + " slots, which does not fit 'levels' and 'degree'");
    }
    if (parts.levels.data[parts.entry_point] != highest) {
      refuse(entry_point, "must be a point of the highest level, but row " +
                              std::to_string(parts.entry_point) + " is not");
    }
    check_links(parts, links);
    return parts;
  }

 private:
  /// A link on a level must lead to a point of that level: FAISS reads that point's slots there.
  void check_links(const HnswParts& parts, size_t input) const {
    const int32_t* link = parts.links.data;
    for (int64_t row = 0; row < parts.levels.size; ++row) {
      for (int32_t level = 0; level < parts.levels.data[row]; ++level) {
        const int64_t width = level == 0 ? 2 * parts.degree : parts.degree;
        for (const int32_t* end = link + width; link != end; ++link) {
          if (*link == -1) continue;
          if (*link < -1 || *link >= parts.levels.size) {
            refuse(input, "must hold rows of 'points' or -1, but slot " +
                              std::to_string(link - parts.links.data) + " is " +
                              std::to_string(*link));
          }
          if (parts.levels.data[*link] <= level) {
            refuse(input, "leads from row " + std::to_string(row) + " to row " +
                              std::to_string(*link) + " on level " + std::to_string(level) +
                              ", where the latter is not");
          }
        }
      }
    }
  }
};

}  // namespace

Parameters read_parameters(const ConstantReader& constants, IndexKind kind) {
  const Reader reader(constants);
  Parameters parameters;
  int64_t most_neighbours = 0;
  const auto shaped_like = [&](const Tensor<float>& points) {
    most_neighbours = parameters.count = points.shape[0];
    parameters.dim = points.shape[1];
  };
  switch (kind) {
    case IndexKind::kFlat: {
      FlatParts parts{reader.points(kFirstOfIndex)};
      shaped_like(parts.points);
      parameters.index = std::move(parts);
      break;
    }
    case IndexKind::kIvf: {
      IvfParts parts;
      parts.points = reader.points(kFirstOfIndex);
      shaped_like(parts.points);
      parts.lists = reader.lists(kFirstOfIndex + 1, parameters.count, parameters.dim);
      parameters.index = std::move(parts);
      break;
    }
    case IndexKind::kIvfpq: {
      IvfpqParts parts = reader.product_quantised();
      most_neighbours = parameters.count = parts.codes.shape[0];
      parameters.dim = parts.lists.centroids.shape[1];
      parameters.index = std::move(parts);
      break;
    }
    case IndexKind::kHnsw: {
      HnswParts parts = reader.graph();
      shaped_like(parts.points);
      parameters.index = std::move(parts);
      break;
    }
    case IndexKind::kLocal: {
      LocalParts parts;
      parts.points = reader.points(kFirstOfIndex);
      shaped_like(parts.points);
      parts.neighbourhoods = reader.neighbourhoods(kFirstOfIndex + 1, parameters.count);
      most_neighbours = parts.neighbourhoods.shape[1];
      parts.lists = reader.lists(kFirstOfIndex + 2, parameters.count, parameters.dim);
      parameters.index = std::move(parts);
      break;
    }
  }
  parameters.k = std::min(reader.integer(kK, 1, most_neighbours), reader.schema().most_neighbours);
  parameters.length_scale = reader.positive(kLengthScale);
  parameters.jitter = reader.positive(kJitter);
  return parameters;
}

}  // namespace gapa
