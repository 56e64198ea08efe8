#include "check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

extern "C" gapa::ort::Status* RegisterCustomOps(gapa::ort::SessionOptions*,
                                                const gapa::ort::ApiBase*);

namespace gapa::fuzz {
namespace {

using ort::Value;

[[noreturn]] void broken(const Case& one, const std::string& promise) {
  std::fprintf(stderr, "%s: %s (%s)\n", kOperators[one.op], promise.c_str(),
               one.sound ? "nothing was wrong with it" : one.damage.c_str());
  std::abort();
}

void expect(const Case& one, bool kept, const char* promise) {
  if (!kept) broken(one, promise);
}

/// Takes the message out of a status and gives it back.
std::string taken(const Case& one, ort::Status* status) {
  const std::string message = status->message;
  ort::ReleaseStatus(stand_in()->GetApi(1), status);
  expect(one, !message.empty(), "a refusal without a word");
  return message;
}

/// A call into the library, whose allocations may be made to fail.
template <typename Call>
ort::Status* library(const Call& call) {
  trouble().in_library = true;
  ort::Status* const status = call();
  trouble().in_library = false;
  return status;
}

const ort::CustomOp* find(const ort::CustomOpDomain& domain, const char* name) {
  for (const ort::CustomOp* op : domain.ops) {
    if (std::strcmp(op->GetName(op), name) == 0) return op;
  }
  return nullptr;
}

struct Run {
  ort::KernelContext context;
  ort::Status* status = nullptr;
};

/// Computes with another first inputs, if they are given.
Run run(const Case& one, const ort::CustomOp* op, void* kernel, int pool,
        const std::vector<const Value*>& first = {}) {
  Run run;
  for (const Operand& input : one.inputs) {
    run.context.inputs.push_back(input.missing ? nullptr : &input.value);
  }
  std::copy(first.begin(), first.end(), run.context.inputs.begin());
  run.context.output_count = one.output_count;
  run.context.wanted = one.wanted;
  for (size_t i = 0; i < one.output_count; ++i) {
    run.context.output_types.push_back(op->GetOutputType(op, i));
  }
  run.context.outputs.resize(one.output_count);
  run.context.made.resize(one.output_count);
  run.context.misaligned = one.misaligned;
  run.context.pool = pool;
  run.status = library([&] { return op->KernelComputeV2(kernel, &run.context); });
  return run;
}

bool same_bits(const Run& a, const Run& b) {
  for (size_t i = 0; i < a.context.outputs.size(); ++i) {
    const Value &left = a.context.outputs[i], &right = b.context.outputs[i];
    if (a.context.made[i] != b.context.made[i] || left.shape != right.shape ||
        left.bytes != right.bytes ||
        (left.bytes != 0 && std::memcmp(left.data(), right.data(), left.bytes) != 0)) {
      return false;
    }
  }
  return true;
}

/// How the rows lie in tensors like input 0: (outer, along, inner).
struct Layout {
  int64_t outer = 1, along = 1, inner = 1;
  int64_t rows() const { return outer * inner; }
  int64_t at(int64_t row, int64_t element) const {
    return (row / inner * along + element) * inner + row % inner;
  }
};

Layout layout_of(const Case& one) {
  const std::vector<int64_t>& shape = one.inputs[0].value.shape;
  const size_t axis = one.op == kClasses ? one.inputs[4].value.as<int64_t>()[0] : shape.size() - 1;
  Layout layout;
  for (size_t i = 0; i < axis; ++i) layout.outer *= shape[i];
  layout.along = shape[axis];
  // Behind an empty axis the others may be of any size.
  for (size_t i = axis + 1; i < shape.size() && layout.outer > 0; ++i) layout.inner *= shape[i];
  if (layout.outer == 0) layout.inner = 0;
  return layout;
}

template <typename T>
const T* output_of(const Run& run, size_t which) {
  return which < run.context.outputs.size() && run.context.made[which]
             ? run.context.outputs[which].as<T>()
             : nullptr;
}

double squared_distance(const float* a, const float* b, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const double difference = static_cast<double>(a[i]) - b[i];
    sum += difference * difference;
  }
  return sum;
}

void check_activation(const Case& one, const Run& run, const Layout& layout) {
  const float* const query = one.inputs[0].value.as<float>();
  const Value& stored = one.inputs[4].value;  // points, or codes
  const int64_t points = stored.shape[0];
  const float* const s = output_of<float>(run, 0);
  const int64_t* const neighbours = output_of<int64_t>(run, 1);
  const int64_t k = neighbours ? run.context.outputs[1].shape.back() : 0;
  std::vector<double> distances(points);
  std::vector<int64_t> seen;
  for (int64_t row = 0; row < layout.rows(); ++row) {
    const float* const q = query + row * layout.along;
    const bool finite = std::all_of(q, q + layout.along, [](float x) { return std::isfinite(x); });
    if (s != nullptr) {
      expect(one, finite ? s[row] >= 0 && s[row] <= 1 : std::isnan(s[row]),
             "a share outside of [0, 1], or a number for a query that is none");
    }
    if (neighbours == nullptr) continue;
    const int64_t* const ids = neighbours + row * k;
    seen.assign(ids, ids + k);
    for (const int64_t id : seen) {
      expect(one, id >= -1 && id < points && (finite || id == -1), "a neighbour that is no point");
    }
    if (one.op == kLocal || one.op == kPrepared || !finite) continue;
    std::sort(seen.begin(), seen.end());
    for (int64_t i = 1; i < k; ++i) {
      expect(one, seen[i] == -1 || seen[i] != seen[i - 1], "a neighbour twice");
    }
    if (one.op != kFlat) continue;
    // The k nearest of all, by a sum in another order: rounding may exchange equal ones.
    expect(one, ids[k - 1] >= 0, "fewer neighbours than there are points");
    for (int64_t p = 0; p < points; ++p) {
      distances[p] = squared_distance(q, stored.as<float>() + p * layout.along, layout.along);
    }
    double farthest = 0;
    for (int64_t i = 0; i < k; ++i) farthest = std::max(farthest, distances[ids[i]]);
    std::nth_element(distances.begin(), distances.begin() + (k - 1), distances.end());
    expect(one, farthest <= distances[k - 1] * (1 + 1e-13 * (layout.along + 4)),
           "a neighbour that is not among the nearest");
  }
}

void check_classes(const Case& one, const Run& run, const Layout& layout) {
  const float* const mean = one.inputs[0].value.as<float>();
  const float* const var = one.inputs[1].value.as<float>();
  const float* const predicted = one.inputs[2].value.as<float>();
  const float* const probs = output_of<float>(run, 0);
  for (int64_t row = 0; row < layout.rows(); ++row) {
    bool numbers = true, ordinary = true;  // of what is promised a number; of what entropies need
    double sum = 0;
    for (int64_t c = 0; c < layout.along; ++c) {
      const int64_t at = layout.at(row, c);
      numbers = numbers && !std::isnan(mean[at]) && !std::isnan(var[at]) &&
                !(mean[at] > std::numeric_limits<float>::max()) && !std::isnan(predicted[at]);
      ordinary = ordinary && var[at] >= 0 && std::isfinite(var[at]);
      sum += var[at];
    }
    numbers = numbers && ordinary;
    if (probs != nullptr && numbers) {
      double total = 0;
      int64_t kept = 0;
      for (int64_t c = 0; c < layout.along; ++c) {
        const float p = probs[layout.at(row, c)];
        expect(one, p >= 0 && p <= 1, "a probability outside of [0, 1]");
        total += p;
        if (predicted[layout.at(row, c)] > predicted[layout.at(row, kept)]) kept = c;
      }
      bool agreed = true;  // where the source's class is another, the others are held below it
      for (int64_t c = 0; c < layout.along; ++c) {
        agreed = agreed && !(mean[layout.at(row, c)] > mean[layout.at(row, kept)]);
      }
      expect(one, !agreed || std::fabs(total - 1) < 1e-5 + 1e-7 * layout.along,
             "probabilities that are not 1");
      for (int64_t c = 0; c < layout.along; ++c) {
        expect(one, c == kept || probs[layout.at(row, c)] < probs[layout.at(row, kept)],
               "another class than the source's is the largest");
      }
    }
    for (size_t which = 1; which < 4; ++which) {
      const float* const entropy = output_of<float>(run, which);
      if (entropy == nullptr) continue;
      expect(one,
             numbers ? entropy[row] >= 0 && entropy[row] <= std::log(layout.along) + 1e-4
                     : !(entropy[row] < 0),
             "an entropy outside of its bounds");
    }
    if (const float* const score = output_of<float>(run, 4); score != nullptr && numbers) {
      expect(one, std::fabs(score[row] - sum / layout.along) <= 1e-5 * sum / layout.along + 1e-44,
             "a score that is not the mean variance");
    }
  }
}

void check_leading(const Case& one, const Run& run, const Layout& layout) {
  const float* const x = one.inputs[0].value.as<float>();
  const int64_t k = one.inputs[1].value.as<int64_t>()[0];
  const float* const values = output_of<float>(run, 0);
  const int64_t* const indices = output_of<int64_t>(run, 1);
  std::vector<int64_t> order(layout.along);
  for (int64_t row = 0; row < layout.rows(); ++row) {
    const float* const all = x + row * layout.along;
    const auto size = [&](int64_t i) { return std::isnan(all[i]) ? HUGE_VALF : all[i]; };
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return size(a) > size(b); });
    for (int64_t i = 0; i < k; ++i) {
      if (indices != nullptr) {
        expect(one, indices[row * k + i] == order[i], "a place that is not the next largest's");
      }
      if (values != nullptr) {
        expect(one, std::memcmp(values + row * k + i, all + order[i], sizeof(float)) == 0,
               "a value that is not the next largest");
      }
    }
  }
}

/// Nothing was left as the stand-in made it. A float of these bytes is -2.9e-16: no answer is that.
void check_written(const Case& one, const Run& run) {
  for (size_t i = 0; i < run.context.outputs.size(); ++i) {
    if (!run.context.made[i]) continue;
    const Value& value = run.context.outputs[i];
    const size_t element = size_of(value.type);
    uint8_t unwritten[8];
    std::memset(unwritten, ort::kUnwritten, sizeof unwritten);
    for (size_t at = 0; at < value.bytes; at += element) {
      if (std::memcmp(value.data() + at, unwritten, element) != 0) continue;
      // GapaLeading hands on values as they are.
      if (one.op != kLeading) broken(one, "part of an output was not written");
    }
  }
}

/// Row by row the answers are the same, whatever the batch.
void check_alone(const Case& one, const ort::CustomOp* op, void* kernel, const Run& whole,
                 const Layout& layout) {
  const size_t alike = one.op == kClasses ? 3 : 1;  // inputs that have rows
  std::vector<int64_t> shape = one.inputs[0].value.shape;
  const size_t axis = one.op == kClasses ? one.inputs[4].value.as<int64_t>()[0] : shape.size() - 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i != axis) shape[i] = 1;
  }
  const int64_t rows = layout.rows();
  for (const int64_t row : {int64_t{0}, rows - 1}) {
    std::vector<Value> values(alike);
    std::vector<const Value*> first;
    for (size_t i = 0; i < alike; ++i) {
      values[i].allocate(ort::kFloat, shape, 0);
      for (int64_t e = 0; e < layout.along; ++e) {
        values[i].as<float>()[e] = one.inputs[i].value.as<float>()[layout.at(row, e)];
      }
      first.push_back(&values[i]);
    }
    const Run alone = run(one, op, kernel, 1, first);
    if (alone.status != nullptr) broken(one, "alone refused: " + taken(one, alone.status));
    for (size_t i = 0; i < whole.context.outputs.size(); ++i) {
      if (!whole.context.made[i]) continue;
      const Value &all = whole.context.outputs[i], &mine = alone.context.outputs[i];
      const size_t element = size_of(all.type);
      const bool like_input = one.op == kClasses && i == 0;
      const int64_t width = like_input ? layout.along : all.count() / rows;
      for (int64_t e = 0; e < width; ++e) {
        const int64_t at = like_input ? layout.at(row, e) : row * width + e;
        if (std::memcmp(all.data() + at * element, mine.data() + e * element, element) != 0) {
          broken(one, "row " + std::to_string(row) + " alone has another answer in output " +
                          std::to_string(i) + " than in the batch");
        }
      }
    }
    if (rows == 1) break;
  }
}

void check_shapes(const Case& one, const ort::CustomOp* op) {
  ort::ShapeInferContext context;
  if (!one.declared.names.empty() || !one.declared.shape.empty()) {
    context.inputs.push_back(one.declared);
  }
  context.outputs.resize(op->GetOutputTypeCount(op));
  if (ort::Status* const status = library([&] { return op->InferOutputShapeFn(op, &context); })) {
    const std::string why = taken(one, status);
    if (one.sound) broken(one, "shapes are refused: " + why);
    return;
  }
  for (const ort::TensorInfo& output : context.outputs) {
    for (size_t axis = 0; axis < output.shape.size(); ++axis) {
      expect(one, output.shape[axis] >= 0 || !output.names[axis].empty(),
             "an unknown dimension without a name is passed on");
    }
  }
}

void check_threads(const Case& one, const ort::CustomOp* op, void* kernel, const Run& whole,
                   int threads) {
  std::vector<Run> runs(threads);
  on_pool(threads, threads,
          [&](size_t i) { runs[i] = run(one, op, kernel, i % 2 == 0 ? one.pool : 2); });
  for (const Run& other : runs) {
    if (other.status != nullptr) broken(one, "refused on a thread: " + taken(one, other.status));
    expect(one, same_bits(whole, other), "another answer on another thread");
  }
}

}  // namespace

Answer check(const Case& one, int threads) {
  Trouble& troubles = trouble();
  const int64_t statuses_before = troubles.statuses_alive;
  troubles.calls_until_failure = one.failing_call;
  troubles.allocations_until_failure = one.failing_allocation;
  const auto refused = [&](Outcome outcome, ort::Status* status) {
    troubles.calls_until_failure = troubles.allocations_until_failure = -1;
    const std::string why = taken(one, status);
    if (one.sound) broken(one, "refused: " + why);
    expect(one, troubles.statuses_alive == statuses_before, "a status that nobody released");
    return Answer{outcome, why};
  };

  ort::SessionOptions options{one.most_neighbours};
  const ort::ApiBase* const base = stand_in(one.version.c_str());
  if (ort::Status* const status = library([&] { return RegisterCustomOps(&options, base); })) {
    return refused(Outcome::kRefusedAtRegistration, status);
  }
  const ort::CustomOp* const op = find(*options.domain, kOperators[one.op]);
  expect(one, op != nullptr && op->GetInputTypeCount(op) == one.inputs.size(),
         "the operator is not what the contract says");
  check_shapes(one, op);

  ort::KernelInfo info;
  for (const Operand& input : one.inputs) {
    info.constants.push_back(input.constant && !input.missing ? &input.value : nullptr);
  }
  const ort::Api* const api = base->GetApi(ort::kOldestVersion);
  void* raw = nullptr;
  if (ort::Status* const status =
          library([&] { return op->CreateKernelV2(op, api, &info, &raw); })) {
    return refused(Outcome::kRefusedAtLoad, status);
  }
  const std::unique_ptr<void, void (*)(void*)> kernel(raw, op->KernelDestroy);
  const Run whole = run(one, op, raw, one.pool);
  if (whole.status != nullptr) return refused(Outcome::kRefusedAtRun, whole.status);
  troubles.calls_until_failure = troubles.allocations_until_failure = -1;
  expect(one, troubles.statuses_alive == statuses_before, "a status that nobody released");

  const Layout layout = layout_of(one);
  check_written(one, whole);
  // Without a row the last axis may be of any size.
  const bool rows = layout.rows() > 0;
  if (rows && one.op == kClasses) check_classes(one, whole, layout);
  if (rows && one.op == kLeading) check_leading(one, whole, layout);
  if (rows && one.op < kClasses) check_activation(one, whole, layout);
  if (rows) check_alone(one, op, raw, whole, layout);
  if (threads > 0) {
    // A node of its own, which has not computed anything yet.
    void* fresh = nullptr;
    if (ort::Status* const status = op->CreateKernelV2(op, api, &info, &fresh)) {
      broken(one, "refused the second time: " + taken(one, status));
    }
    const std::unique_ptr<void, void (*)(void*)> held(fresh, op->KernelDestroy);
    check_threads(one, op, fresh, whole, threads);
  }
  return {Outcome::kComputed, ""};
}

}  // namespace gapa::fuzz
