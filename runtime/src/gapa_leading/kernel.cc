#include "gapa_leading/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "constants.h"
#include "gapa_leading/schema.h"
#include "scratch.h"
#include "simd/kernels.h"
#include "tensors.h"

namespace gapa {
namespace {

enum LeadingInput : size_t { kX, kCount };
enum LeadingOutput : size_t { kValues, kIndices };

constexpr int64_t kTaskSize = 1 << 16;  // elements in one task of a thread
constexpr int64_t kGroup = 16;          // elements whose largest one is found first
constexpr int kSteps = 20;              // of a bisection, which may end early
constexpr int64_t kSlack = 16;          // where a sixteenth too many is no more than it costs
constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();  // a place has 31 bits

/// A number and its place, as one that sorts in descending order of numbers. What is not a number
/// counts as infinite, so that it is never overlooked.
uint64_t ranked(float x, int64_t place) {
  const float number = std::isnan(x) ? std::numeric_limits<float>::infinity() : x + 0.0f;  // no -0
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint64_t>(place);
}

int64_t place_of(uint64_t candidate) { return static_cast<int64_t>(candidate & 0xffffffffu); }

/// A number that at least k of the values reach and few more: near the k-th largest, never above.
float reached_by(const float* values, int64_t count, int64_t k) {
  const simd::Kernels& kernels = simd::kernels();
  const simd::Range range = kernels.range(values, count);
  if (!std::isfinite(range.largest - range.least)) {
    std::vector<float> order(values, values + count);
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<float>());
    return order[k - 1];
  }
  float low = range.least, high = range.largest;  // at least k are not below the one
  for (int step = 0; step < kSteps; ++step) {
    const float middle = low + (high - low) / 2;
    const int64_t above = count - kernels.count_up_to(values, count, middle);
    (above < k ? high : low) = middle;
    if (above >= k && above <= k + k / kSlack) break;
  }
  return low;
}

struct Room {
  explicit Room(int64_t n) : highest(n / kGroup + 1), positions(n), candidates(n), other(n) {}
  Scratch<float> highest;
  Scratch<int32_t> positions;
  Scratch<uint64_t> candidates, other;
};

/// Sorts numbers by their upper half, those that are equal there as they stand.
void sort_by_upper_half(uint64_t* values, uint64_t* other, int64_t count) {
  constexpr int kBits = 8, kValues = 1 << kBits, kPasses = 32 / kBits;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = 32 + kBits * pass;
    int64_t begin[kValues + 1] = {};
    for (int64_t i = 0; i < count; ++i) ++begin[(values[i] >> shift & (kValues - 1)) + 1];
    for (int value = 0; value < kValues; ++value) begin[value + 1] += begin[value];
    for (int64_t i = 0; i < count; ++i) {
      other[begin[values[i] >> shift & (kValues - 1)]++] = values[i];
    }
    std::swap(values, other);  // an even number of times
  }
}

/// The places of the k largest of n numbers, the largest first, in room.candidates.
///
/// Of the largest numbers of small groups, the k-th is a lower bound: k numbers at least reach it.
/// Few others do, and only those are sorted.
void leading(const float* x, int64_t n, int64_t k, Room& room) {
  const simd::Kernels& kernels = simd::kernels();
  const int64_t groups = kernels.highest(x, n, kGroup, room.highest.data());
  const float bound = groups < 2 * k ? -std::numeric_limits<float>::infinity()
                                     : reached_by(room.highest.data(), groups, k);
  const int64_t count = kernels.positions_from(x, n, bound, room.positions.data());
  for (int64_t i = 0; i < count; ++i) {
    room.candidates[i] = ranked(x[room.positions[i]], room.positions[i]);
  }
  sort_by_upper_half(room.candidates.data(), room.other.data(), count);
}

}  // namespace

LeadingKernel::LeadingKernel(const ort::Api* api, const ort::KernelInfo* info,
                             const OpSchema& schema)
    : Kernel(api, schema.name),
      k_(ConstantReader(api, info, schema)
             .integer(kCount, 1, std::numeric_limits<int32_t>::max())) {}

void LeadingKernel::compute(ort::KernelContext* context) const {
  const Input<float> x = input<float>(api_, context, kX, name(), "x");
  if (x.shape.empty() || x.shape.back() < k_ || x.shape.back() > kLongest) {
    throw ModelError(std::string(name()) +
                     ": input 'x' must have at least k = " + std::to_string(k_) +
                     " elements on its last axis, but has shape " + shape_text(x.shape) + ".");
  }
  const int64_t n = x.shape.back();
  std::vector<int64_t> shape = x.shape;
  shape.back() = k_;
  int64_t rows = 1;
  for (size_t axis = 0; axis + 1 < shape.size(); ++axis) rows *= shape[axis];
  float* const values = output<float>(api_, context, kValues, shape);
  int64_t* const indices = output<int64_t>(api_, context, kIndices, shape);
  if (rows == 0) return;
  const int64_t block = std::max<int64_t>(1, kTaskSize / n);
  parallel_for(api_, context, (rows + block - 1) / block, [&](size_t task) {
    Room room(n);
    const int64_t begin = static_cast<int64_t>(task) * block, end = std::min(rows, begin + block);
    for (int64_t row = begin; row < end; ++row) {
      leading(x.data + row * n, n, k_, room);
      for (int64_t rank = 0; rank < k_; ++rank) {
        const int64_t place = place_of(room.candidates[rank]);
        if (values) values[row * k_ + rank] = x.data[row * n + place];
        if (indices) indices[row * k_ + rank] = place;
      }
    }
  });
}

OpSchema leading_schema() {
  return {"GapaLeading",
          {{"x", ort::kFloat}, {"k", ort::kInt64}},
          {{"values", ort::kFloat}, {"indices", ort::kInt64}},
          [](const ort::Api* api, const ort::KernelInfo* info,
             const OpSchema& schema) -> std::unique_ptr<Kernel> {
            return std::make_unique<LeadingKernel>(api, info, schema);
          },
          // The size of the last axis is a tensor.
          [](const ort::Api*, ort::ShapeInferContext*) {}};
}

}  // namespace gapa
