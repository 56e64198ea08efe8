#include "cases.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace gapa::fuzz {
namespace {

using ort::kBool;
using ort::kDouble;
using ort::kFloat;
using ort::kInt32;
using ort::kInt64;
using ort::kUint8;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

// Sizes are small: many cases a second find more than large ones do. These few go where the code
// has other ways for much data.
constexpr int64_t kManyOnceIn = 3000, kVeryManyOnceIn = 60000;

using Shape = std::vector<int64_t>;

/// How numbers look: spread, on a lattice (many equal distances), all equal, huge, tiny, of all
/// sizes.
enum class Look { kSpread, kLattice, kEqual, kHuge, kTiny, kMixed, kClusters };

class Maker {
 public:
  explicit Maker(Random& random) : random_(random) {}

  Case make(std::optional<size_t> op);

 private:
  float number(Look look) {
    switch (look) {
      case Look::kSpread:
        return 2 * random_.unit();
      case Look::kLattice:
        return static_cast<float>(random_.between(-2, 2));
      case Look::kEqual:
        return 0.5f;
      case Look::kHuge:
        return random_.unit() * scale_;
      case Look::kTiny:
        return random_.unit() * 1e-39f;
      case Look::kClusters:
        return static_cast<float>(random_.between(-3, 3)) + 1e-3f * random_.unit();
      case Look::kMixed:
        break;
    }
    return std::ldexp(random_.unit(), static_cast<int>(random_.between(-140, 120)));
  }

  Look look() {
    constexpr Look kLooks[] = {Look::kSpread,  Look::kSpread,   Look::kSpread, Look::kClusters,
                               Look::kLattice, Look::kClusters, Look::kSpread, Look::kLattice,
                               Look::kEqual,   Look::kHuge,     Look::kTiny,   Look::kMixed};
    constexpr float kScales[] = {1e4f, 1e10f, 1e17f, 1e19f, 1e25f, 1e37f};
    scale_ = random_.one_of(kScales);
    return random_.one_of(kLooks);
  }

  Operand& add(int type, Shape shape, bool constant = true) {
    Operand operand;
    operand.constant = constant;
    operand.value.allocate(type, std::move(shape), 0,
                           random_.once_in(4) ? random_.between(0, 3) : 0);
    case_.inputs.push_back(std::move(operand));
    return case_.inputs.back();
  }

  float* add_numbers(Shape shape, Look look, bool constant = true) {
    ort::Value& value = add(kFloat, std::move(shape), constant).value;
    const int64_t count = value.count();
    for (int64_t i = 0; i < count; ++i) value.as<float>()[i] = number(look);
    return value.as<float>();
  }

  void add_integer(int64_t number) {
    *add(kInt64, random_.once_in(4) ? Shape{} : Shape{1}).value.as<int64_t>() = number;
  }

  void add_scalar(float number) {
    *add(kFloat, random_.once_in(4) ? Shape{1} : Shape{}).value.as<float>() = number;
  }

  /// Leading axes of any rank for about so many rows, and the last axis.
  Shape spread_over_axes(int64_t rows, int64_t last) {
    Shape shape;
    switch (random_.below(6)) {
      case 0:
        shape = {1, rows};
        break;
      case 1:
        shape = {(rows + 1) / 2, 1, 2};
        break;
      case 2:
        if (rows <= 1) break;  // also no leading axis at all
        [[fallthrough]];
      default:
        shape = {rows};
    }
    shape.push_back(last);
    return shape;
  }

  void activation();
  void lists(int64_t rows, int64_t dim, Look look, bool whole);
  void graph(int64_t rows);
  void codes(int64_t rows, int64_t dim, Look look);
  void neighbourhoods(int64_t rows, int64_t width);
  void classes();
  void leading();

  void surroundings();
  void damage();
  void damage_value(Operand& operand);
  void damage_shape(Operand& operand);
  bool damage_once();

  Random& random_;
  Case case_;
  float scale_ = 1e10f;
};

void Maker::lists(int64_t rows, int64_t dim, Look look, bool whole) {
  const int64_t count = random_.between(1, std::min<int64_t>(rows, 12) + random_.below(2));
  add_numbers({count, dim}, look);
  int64_t* const offsets = add(kInt64, {count + 1}).value.as<int64_t>();
  for (int64_t i = 1; i < count; ++i) offsets[i] = random_.between(0, rows);
  std::sort(offsets + 1, offsets + count);
  offsets[count] = rows;
  add_integer(whole ? count : random_.between(1, count));
}

void Maker::graph(int64_t rows) {
  const int64_t degree = random_.between(1, 6);
  int32_t* const levels = add(kInt32, {rows}).value.as<int32_t>();
  int64_t slots = 0, entry = 0;
  for (int64_t row = 0; row < rows; ++row) {
    levels[row] = random_.once_in(5) ? static_cast<int32_t>(random_.between(1, 4)) : 1;
    if (levels[row] > levels[entry]) entry = row;
    slots += (levels[row] + 1) * degree;
  }
  int32_t* link = add(kInt32, {slots}).value.as<int32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    for (int32_t level = 0; level < levels[row]; ++level) {
      const int64_t width = level == 0 ? 2 * degree : degree;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t to = random_.below(rows);
        *link++ = levels[to] > level && !random_.once_in(6) ? static_cast<int32_t>(to) : -1;
      }
    }
  }
  add_integer(degree);
  add_integer(entry);
  add_integer(random_.once_in(8) ? std::numeric_limits<int64_t>::max() : random_.between(1, 40));
}

void Maker::codes(int64_t rows, int64_t dim, Look look) {
  // Of the divisors of the dimension one is taken.
  int64_t parts = random_.between(1, dim);
  while (dim % parts != 0) --parts;
  ort::Value& codes = add(kUint8, {rows, parts}).value;
  for (int64_t i = 0; i < codes.count(); ++i) {
    codes.data()[i] = static_cast<uint8_t>(random_.below(256));
  }
  float* const books = add(kFloat, {parts, 256, dim / parts}).value.as<float>();
  // Drawing each number would cost more than the rest of the case.
  float few[16];
  for (float& one : few) one = number(look) / 4;
  for (int64_t i = 0; i < dim * 256; ++i) books[i] = few[(i * 7 + i / 256) % 16];
}

void Maker::neighbourhoods(int64_t rows, int64_t width) {
  ort::Value& value = add(kInt32, {rows, width}).value;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < width; ++i) {
      value.as<int32_t>()[row * width + i] =
          static_cast<int32_t>(i == 0 ? row : random_.below(rows));
    }
  }
}

void Maker::activation() {
  const size_t op = case_.op;
  const bool local = op == kLocal || op == kPrepared;
  const bool very_many = random_.once_in(kVeryManyOnceIn);
  const bool many = very_many || random_.once_in(kManyOnceIn);
  const bool searched = op == kFlat || local;     // there is a scan of reduced points
  const int64_t widest = op == kIvfpq ? 16 : 70;  // each axis has 256 numbers there
  int64_t dim = random_.once_in(12) ? random_.between(9, widest) : random_.between(1, 8);
  int64_t rows = random_.once_in(16) ? random_.between(21, 90) : random_.between(1, 20);
  if (many) {
    dim = searched ? random_.between(16, 48) : random_.between(1, 24);
    rows = random_.between(600, 1500);
  }
  if (very_many) {
    dim = local ? random_.between(1, 3) : 128;
    rows = op == kIvfpq || op == kHnsw ? random_.between(2000, 4000) : random_.between(8300, 9000);
  }
  const Look points = many ? (random_.once_in(3) ? look() : Look::kClusters) : look();
  const int64_t n = random_.once_in(24) ? random_.between(7, 70) : random_.between(0, 5);
  float* const queries = add_numbers(spread_over_axes(n, dim), random_.once_in(4) ? look() : points,
                                     /*constant=*/random_.once_in(50));
  const int64_t made = case_.inputs[0].value.count() / dim;

  const int64_t width = !local               ? rows
                        : very_many          ? 60
                        : random_.once_in(9) ? random_.between(1, 60)
                                             : random_.between(1, 12);
  const int64_t most = std::min<int64_t>(width, random_.once_in(8) ? 60 : 12);
  add_integer(very_many && local ? 50 : random_.between(1, most));
  add_scalar(random_.once_in(6) ? std::fabs(number(Look::kMixed)) + FLT_MIN
                                : 0.05f + 3 * std::fabs(random_.unit()));
  constexpr float kJitters[] = {1e-6f, 1e-4f, 1e-2f, 1, 1e-12f, 1e-30f, 1e-45f, 1e20f};
  add_scalar(random_.once_in(3) ? random_.one_of(kJitters) : 1e-6f);

  const float* stored = nullptr;
  if (op == kIvfpq) {
    codes(rows, dim, points == Look::kHuge || points == Look::kMixed ? Look::kSpread : points);
  } else {
    stored = add_numbers({rows, dim}, points, /*constant=*/!random_.once_in(10));
  }
  if (local) neighbourhoods(rows, width);
  if (op == kHnsw) graph(rows);
  if (op == kIvf || op == kIvfpq || local) {
    const bool plain = op == kIvfpq && (points == Look::kHuge || points == Look::kMixed);
    lists(rows, dim, plain ? Look::kSpread : points, random_.once_in(2));
  }
  if (op == kPrepared) {  // what the portable body reads: of any shape, and any numbers
    ort::Value& of_row = add(kInt32, {random_.between(0, rows)}).value;
    for (int64_t i = 0; i < of_row.count(); ++i) of_row.as<int32_t>()[i] = -1;
    add_numbers({random_.between(0, 3), 2}, look());
  }

  for (int64_t q = 0; q < made; ++q) {
    float* const query = queries + q * dim;
    if (stored != nullptr && random_.once_in(3)) {
      std::copy_n(stored + random_.below(rows) * dim, dim, query);
      if (random_.once_in(2)) query[random_.below(dim)] += 1e-3f * random_.unit();
    }
    if (random_.once_in(16)) {
      constexpr float kSpecial[] = {kNotANumber, kInfinity, -kInfinity, FLT_MAX, 1e10f, 1e-45f};
      query[random_.below(dim)] = random_.one_of(kSpecial);
    }
  }
  case_.output_count = random_.once_in(3) ? 1 : 2;
}

void Maker::classes() {
  const int64_t count = random_.once_in(150)  ? random_.between(65, 700)
                        : random_.once_in(16) ? random_.between(13, 64)
                                              : random_.between(1, 12);
  Shape shape;
  const int64_t before = random_.below(3), behind = random_.once_in(2) ? 0 : random_.below(3);
  const auto some = [&] {
    return random_.once_in(20)   ? 0
           : random_.once_in(12) ? random_.between(9, 40)
                                 : random_.between(1, 4);
  };
  for (int64_t i = 0; i < before; ++i) shape.push_back(some());
  shape.push_back(count);
  for (int64_t i = 0; i < behind; ++i) shape.push_back(some());
  const Look means = look(), vars = look();
  float* const mean = add_numbers(shape, means, /*constant=*/false);
  float* const var = add_numbers(shape, vars, false);
  const int64_t size = case_.inputs[0].value.count();
  for (int64_t i = 0; i < size; ++i) var[i] = std::fabs(var[i]);
  float* const output = add_numbers(shape, means, false);
  if (!random_.once_in(4)) std::copy_n(mean, size, output);
  constexpr float kSpecial[] = {kNotANumber, kInfinity, -kInfinity, -1, 0, FLT_MAX, -1e30f, -1e31f};
  for (float* const to : {mean, var, output}) {
    for (int64_t i = random_.once_in(4) ? random_.between(1, 3) : 0; i > 0 && size > 0; --i) {
      to[random_.below(size)] = random_.one_of(kSpecial);
    }
  }
  const int64_t draws = random_.once_in(6) ? random_.between(17, 70) : random_.between(1, 16);
  add_numbers({draws, random_.between(1, 12)}, random_.once_in(3) ? look() : Look::kSpread);
  add_integer(before);
  case_.output_count = random_.between(1, 5);
}

void Maker::leading() {
  const int64_t n = random_.once_in(80)   ? random_.between(200, 6000)
                    : random_.once_in(10) ? random_.between(30, 200)
                                          : random_.between(1, 30);
  const int64_t rows = random_.once_in(12) ? random_.between(5, 30) : random_.between(0, 4);
  float* const x = add_numbers(spread_over_axes(rows, n), look(), /*constant=*/false);
  const int64_t size = case_.inputs[0].value.count();
  constexpr float kSpecial[] = {kNotANumber, kInfinity, -kInfinity, FLT_MAX, 0.0f, -0.0f};
  for (int64_t i = random_.once_in(3) ? random_.between(1, 6) : 0; i > 0 && size > 0; --i) {
    x[random_.below(size)] = random_.one_of(kSpecial);
  }
  add_integer(random_.once_in(4) ? random_.between(1, n)
                                 : random_.between(1, std::max<int64_t>(1, n / 8)));
  case_.output_count = random_.between(1, 2);
}

/// What is right whatever it is: what is asked for, the threads, and a limit of the session.
void Maker::surroundings() {
  if (random_.once_in(5)) case_.wanted = static_cast<uint32_t>(random_.below(32)) | 1;
  case_.misaligned = random_.once_in(4) ? random_.between(0, 3) : 0;
  constexpr int kPools[] = {1, 1, 1, 1, 1, 1, 1, -1, -1, -1};
  case_.pool =
      random_.once_in(64) ? static_cast<int>(random_.between(2, 3)) : random_.one_of(kPools);
  if (random_.once_in(10)) {
    constexpr const char* kLimits[] = {"1", "2", "3", "50", "999999999999999999", "0007"};
    case_.most_neighbours = random_.one_of(kLimits);
  }
  if (random_.once_in(4)) return;  // nothing is known of the shape
  case_.declared = {kFloat, case_.inputs[0].value.shape, {}};
  Shape& shape = case_.declared.shape;
  if (random_.once_in(4)) shape.resize(random_.below(5));
  constexpr int64_t kDims[] = {-1, -1, 0, 1, 7, int64_t{1} << 40};
  for (int64_t& dim : shape) {
    if (random_.once_in(3)) dim = random_.one_of(kDims);
    case_.declared.names.push_back(dim < 0 && random_.once_in(2) ? "N" : "");
  }
}

/// One number becomes something that it should not be.
void Maker::damage_value(Operand& operand) {
  ort::Value& value = operand.value;
  const int64_t count = value.count();
  if (count == 0) return;
  const int64_t at = random_.below(count);
  const int64_t rows = case_.inputs.size() > 4 && !case_.inputs[4].value.shape.empty()
                           ? case_.inputs[4].value.shape[0]
                           : 1;
  constexpr int64_t kWhole[] = {-1,
                                -2,
                                0,
                                1,
                                2,
                                255,
                                std::numeric_limits<int32_t>::max(),
                                std::numeric_limits<int32_t>::min(),
                                std::numeric_limits<int32_t>::max() / 4,
                                int64_t{1} << 32,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min(),
                                int64_t{1} << 40};
  const int64_t whole = random_.once_in(3) ? rows + random_.between(-2, 1) : random_.one_of(kWhole);
  constexpr float kSpecial[] = {kNotANumber, kInfinity, -kInfinity, 1e-45f,   1e10f, -1e10f,
                                -1,          0,         FLT_MAX,    -FLT_MAX, 1e30f, 1e-31f};
  switch (value.type) {
    case kFloat:
      value.as<float>()[at] = random_.one_of(kSpecial);
      break;
    case kInt32:
      value.as<int32_t>()[at] = static_cast<int32_t>(static_cast<uint64_t>(whole));
      break;
    case kInt64:
      value.as<int64_t>()[at] = whole;
      break;
    default:
      value.data()[random_.below(static_cast<int64_t>(value.bytes))] ^=
          static_cast<uint8_t>(1 << random_.below(8));
  }
}

/// Another shape, with as many data as that takes.
void Maker::damage_shape(Operand& operand) {
  Shape shape = operand.value.shape;
  const int64_t at = shape.empty() ? 0 : random_.below(static_cast<int64_t>(shape.size()));
  constexpr int64_t kHuge[] = {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 62,
                               std::numeric_limits<int64_t>::max()};
  switch (random_.below(7)) {
    case 0:
      if (!shape.empty()) shape[at] = 0;
      break;
    case 1:
      if (!shape.empty()) shape[at] = 1;
      break;
    case 2:
      if (!shape.empty() && shape[at] <= 1 << 20) shape[at] += random_.once_in(2) ? 1 : -1;
      break;
    case 3:
      if (!shape.empty()) shape.erase(shape.begin() + at);
      break;
    case 4:
      shape.insert(shape.begin() + at, random_.between(1, 2));
      break;
    case 5:
      std::reverse(shape.begin(), shape.end());
      break;
    default:  // nothing in it, and yet huge: behind a 0 the real one accepts any number
      shape.insert(shape.begin(), 0);
      for (int64_t i = random_.between(1, 3); i > 0; --i) {
        const int64_t place = random_.between(1, static_cast<int64_t>(shape.size()));
        shape.insert(shape.begin() + place, random_.one_of(kHuge));
      }
  }
  int64_t size = 1;
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(size, dim, &size) || size > 1 << 20) return;
  }
  ort::Value changed;
  changed.allocate(operand.value.type, shape, 0);
  for (size_t i = 0; operand.value.bytes > 0 && i < changed.bytes; ++i) {
    changed.data()[i] = operand.value.data()[i % operand.value.bytes];
  }
  operand.value = std::move(changed);
}

bool Maker::damage_once() {
  const size_t which =
      static_cast<size_t>(random_.below(static_cast<int64_t>(case_.inputs.size())));
  Operand& operand = case_.inputs[which];
  const std::string name = "input " + std::to_string(which);
  // onnxruntime sees to the types of what comes with a run.
  const size_t first_constant = case_.op == kClasses ? 3 : 1;
  switch (random_.below(16)) {
    case 0:
    case 1:
    case 2:
    case 3:
      damage_value(operand);
      case_.damage += name + ": a value; ";
      return true;
    case 4:
    case 5:
    case 6:
      damage_shape(operand);
      case_.damage += name + ": its shape; ";
      return true;
    case 7: {
      constexpr int kTypes[] = {kFloat, kUint8, kInt32, kInt64, kBool, kDouble, 10};
      if (which < first_constant) return false;
      operand.value.allocate(random_.one_of(kTypes), operand.value.shape, 1);
      case_.damage += name + ": its type; ";
      return true;
    }
    case 8:
      operand.constant = !operand.constant;
      case_.damage += name + ": constant or not; ";
      return true;
    case 9:
      operand.missing = true;
      case_.damage += name + ": missing; ";
      return true;
    case 10: {
      const size_t other =
          static_cast<size_t>(random_.below(static_cast<int64_t>(case_.inputs.size())));
      if (which < first_constant || other < first_constant) return false;
      std::swap(operand.value, case_.inputs[other].value);
      case_.damage += name + ": exchanged with another; ";
      return true;
    }
    case 11:
      if (operand.value.type == kFloat) {
        constexpr float kFactors[] = {1e10f, 1e-30f, -1, 0, 1e30f, kNotANumber};
        const float factor = random_.one_of(kFactors), shift = random_.once_in(2) ? 1e7f : 0;
        for (int64_t i = 0; i < operand.value.count(); ++i) {
          operand.value.as<float>()[i] = operand.value.as<float>()[i] * factor + shift;
        }
      }
      case_.damage += name + ": another scale; ";
      return true;
    case 12:
      for (int64_t i = random_.between(1, 8); i > 0 && operand.value.bytes > 0; --i) {
        operand.value.data()[random_.below(static_cast<int64_t>(operand.value.bytes))] =
            static_cast<uint8_t>(random_.below(256));
      }
      case_.damage += name + ": some bytes; ";
      return true;
    case 13:
      case_.failing_call = static_cast<int>(random_.below(60));
      case_.damage += "a call fails; ";
      return true;
    case 14:
      case_.failing_allocation = static_cast<int>(random_.below(80));
      case_.damage += "an allocation fails; ";
      return true;
    default: {
      if (!random_.once_in(4)) return false;
      constexpr const char* kLimits[] = {"", "0", "-1", "abc", "1e3", "99999999999999999999", " 4"};
      constexpr const char* kVersions[] = {"1.16.3", "0.9", "", "one", "1.17.0", "2.0.0"};
      if (random_.once_in(2)) {
        case_.most_neighbours = random_.one_of(kLimits);
      } else {
        case_.version = random_.one_of(kVersions);
      }
      case_.damage += "the session; ";
      return true;
    }
  }
}

void Maker::damage() {
  for (int64_t times = random_.once_in(4) ? 2 : 1; times > 0;) times -= damage_once();
  case_.sound = false;
}

Case Maker::make(std::optional<size_t> op) {
  case_.op = op ? *op : static_cast<size_t>(random_.below(kOperatorCount));
  case_.op == kClasses ? classes() : case_.op == kLeading ? leading() : activation();
  surroundings();
  if (!random_.once_in(3)) damage();
  return std::move(case_);
}

}  // namespace

Case make_case(Random& random, std::optional<size_t> op) { return Maker(random).make(op); }

}  // namespace gapa::fuzz
