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
#include "tensors.h"

namespace gapa {
namespace {

enum LeadingInput : size_t { kX, kCount };
enum LeadingOutput : size_t { kValues, kIndices };

constexpr int64_t kTaskSize = 1 << 16;    // elements in one task of a thread
constexpr int64_t kGroup = 16;            // elements that are looked at together first
constexpr int64_t kLongest = 0xffffffff;  // a place has 32 bits beside its number

/// A number and its place as one that is larger for larger numbers, and for earlier places among
/// equal ones. What is not a number counts as infinite, so that it is never overlooked.
uint64_t ranked(float x, int64_t place) {
  const float number = std::isnan(x) ? std::numeric_limits<float>::infinity() : x + 0.0f;  // no -0
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint64_t>(kLongest - place);
}

int64_t place_of(uint64_t candidate) {
  return kLongest - static_cast<int64_t>(candidate & kLongest);
}

/// The largest of a group of numbers; infinite where one of them is not a number.
float largest(const float* x) {
  float most = x[0];
  int strange = 0;
  for (int64_t j = 0; j < kGroup; ++j) {
    most = x[j] > most ? x[j] : most;
    strange |= x[j] != x[j];
  }
  return strange ? std::numeric_limits<float>::infinity() : most;
}

struct Scratch {
  std::vector<float> highest, ranked;
  std::vector<uint64_t> candidates;
};

/// The places of the k largest of n numbers, the largest first, as scratch.candidates.
///
/// Of the largest numbers of small groups, the k-th is a lower bound: k numbers at least reach it.
/// Few others do, and only the groups that reach it are looked into.
void leading(const float* x, int64_t n, int64_t k, Scratch& scratch) {
  const auto larger = std::greater<uint64_t>();
  std::vector<uint64_t>& candidates = scratch.candidates;
  candidates.clear();
  const auto take = [&](int64_t begin, int64_t end, float bound) {
    for (int64_t i = begin; i < end; ++i) {
      if (!(x[i] < bound)) candidates.push_back(ranked(x[i], i));
    }
  };
  const int64_t groups = n / kGroup;
  if (groups < 2 * k) {
    take(0, n, -std::numeric_limits<float>::infinity());
  } else {
    std::vector<float>&highest = scratch.highest, &order = scratch.ranked;
    highest.resize(groups);
    for (int64_t g = 0; g < groups; ++g) highest[g] = largest(x + g * kGroup);
    order = highest;
    std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<float>());
    const float bound = order[k - 1];
    for (int64_t g = 0; g < groups; ++g) {
      if (highest[g] >= bound) take(g * kGroup, (g + 1) * kGroup, bound);
    }
    take(groups * kGroup, n, bound);
  }
  std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), larger);
  candidates.resize(k);
  std::sort(candidates.begin(), candidates.end(), larger);
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
    Scratch scratch;
    const int64_t begin = static_cast<int64_t>(task) * block, end = std::min(rows, begin + block);
    for (int64_t row = begin; row < end; ++row) {
      leading(x.data + row * n, n, k_, scratch);
      for (int64_t rank = 0; rank < k_; ++rank) {
        const int64_t place = place_of(scratch.candidates[rank]);
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
