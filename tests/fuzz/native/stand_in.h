// A small stand-in for onnxruntime: the slots of OrtApi that the library calls, with tensors of its
// own. It is as strict as the real one where that protects the library (types of inputs that are
// not constant, sizes that fit into 64 bits), and as careless where the real one is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gapa/ort_abi.h"

namespace gapa::ort {

struct TensorInfo {
  int type = 0;
  std::vector<int64_t> shape;
  std::vector<std::string> names;
};

/// Its memory ends where its data end, so that a sanitizer sees the first byte beyond.
struct Value {
  int type = 0;
  std::vector<int64_t> shape;
  std::vector<uint8_t*> blocks;  ///< at most one
  size_t bytes = 0;

  Value() = default;
  Value(Value&& other) noexcept { *this = std::move(other); }
  Value& operator=(Value&& other) noexcept;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  ~Value();

  int64_t count() const;
  uint8_t* data() const { return blocks.empty() ? nullptr : blocks[0] + shift; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  /// Room for the shape, set to `fill`; `misaligned` elements behind what malloc returns.
  void allocate(int type, std::vector<int64_t> shape, int fill, size_t misaligned = 0);

 private:
  size_t shift = 0;
};

struct Status {
  int code;
  std::string message;
};

struct CustomOpDomain {
  std::vector<const CustomOp*> ops;
};

struct SessionOptions {
  std::optional<std::string> most_neighbours;
  CustomOpDomain* domain = nullptr;
};

/// Of every byte of an output before it is written.
inline constexpr int kUnwritten = 0xa5;

struct KernelInfo {
  std::vector<const Value*> constants;  ///< nullptr where an input is not constant
};

struct KernelContext {
  std::vector<const Value*> inputs;  ///< nullptr where an input is missing
  size_t output_count = 0;           ///< that the node declares
  uint32_t wanted = ~0u;             ///< bit i: somebody asked for output i
  std::vector<int> output_types;
  std::vector<Value> outputs;
  std::vector<bool> made;
  size_t misaligned = 0;
  int pool = 1;  ///< threads; 1 goes through the tasks in order, -1 backwards
};

struct ShapeInferContext {
  std::vector<TensorInfo> inputs;
  std::vector<TensorInfo> outputs;
};

}  // namespace gapa::ort

namespace gapa::fuzz {

size_t size_of(int type);

const ort::ApiBase* stand_in(const char* version = "1.20.1");

/// What goes wrong on this thread, and what it has to clear up.
struct Trouble {
  int calls_until_failure = -1;        ///< into the stand-in; negative: none fails
  int allocations_until_failure = -1;  ///< of the library, by std::bad_alloc; negative: none
  bool in_library = false;
  int64_t statuses_alive = 0;  ///< that nobody has released
};
Trouble& trouble();

/// fn(i) for each i < count, on `threads` threads of which this is one.
void on_pool(int threads, size_t count, const std::function<void(size_t)>& fn);

}  // namespace gapa::fuzz
