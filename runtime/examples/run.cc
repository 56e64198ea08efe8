// Runs a converted model without Python: outputs and how far to trust them.
//
//   gapa_run --onnxruntime LIBONNXRUNTIME.so [--library libgapa_onnx.so] [--rows N]
//            MODEL.onnx INPUT.npy [INPUT.npy ...]
//
// The inputs are given in the model's order. Without --library the same file runs by the standard
// operators inside it. An output y with a y_var of the same shape is printed as mean ± standard
// deviation. Exit code 0: it ran; 1: the model, the runtime or an input failed; 2: usage.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gapa/ort_abi.h"
#include "npy.h"

namespace {

namespace ort = gapa::ort;
using gapa_run::Array;

constexpr const char* kUsage =
    "usage: gapa_run --onnxruntime LIBONNXRUNTIME.so [--library libgapa_onnx.so] [--rows N]\n"
    "                MODEL.onnx INPUT.npy [INPUT.npy ...]\n";

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::string onnxruntime, library, model;
  std::vector<std::string> inputs;
  int64_t rows = 10;  ///< printed per output; 0 prints all
};

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      files.push_back(word);
      continue;
    }
    if (i + 1 == argc) throw UsageError(word + " needs a value.");
    const std::string value = argv[++i];
    if (word == "--onnxruntime") {
      arguments.onnxruntime = value;
    } else if (word == "--library") {
      arguments.library = value;
    } else if (word == "--rows") {
      char* end = nullptr;
      arguments.rows = std::strtoll(value.c_str(), &end, 10);
      if (*end != '\0' || arguments.rows < 0) throw UsageError("--rows needs a number, 0 for all.");
    } else {
      throw UsageError("unknown option " + word + ".");
    }
  }
  if (arguments.onnxruntime.empty()) throw UsageError("--onnxruntime is missing.");
  if (files.size() < 2) throw UsageError("a model and at least one input are needed.");
  arguments.model = files[0];
  arguments.inputs.assign(files.begin() + 1, files.end());
  return arguments;
}

/// A function of a shared library that stays loaded until the process ends.
template <typename Function>
Function* load(const std::string& path, const char* name) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string(dlerror()) + ".");
  void* function = dlsym(library, name);
  if (function == nullptr) throw std::runtime_error(path + " has no function " + name + ".");
  return reinterpret_cast<Function*>(function);
}

void check(const ort::Api* api, ort::Status* status) {
  if (status == nullptr) return;
  const std::string message = ort::GetErrorMessage(api, status);
  ort::ReleaseStatus(api, status);
  throw std::runtime_error(message);
}

/// Something that onnxruntime made and takes back.
template <typename T>
using Owned = std::unique_ptr<T, std::function<void(T*)>>;

template <typename T, typename Release>
Owned<T> own(const ort::Api* api, T* raw, const Release& release) {
  return Owned<T>(raw, [api, release](T* pointer) { release(api, pointer); });
}

struct Tensor {
  std::string name;
  int type = 0;
  std::vector<int64_t> shape;
  std::vector<double> values;  ///< empty if the type is not one that we print

  int64_t columns() const { return shape.empty() ? 1 : shape.back(); }
};

template <typename T>
std::vector<double> widen(const void* data, int64_t count) {
  const T* typed = static_cast<const T*>(data);
  return std::vector<double>(typed, typed + count);
}

/// One loaded model.
class Model {
 public:
  Model(const ort::ApiBase* base, const Arguments& arguments) {
    api_ = base->GetApi(ort::kOldestVersion);
    if (api_ == nullptr) {
      throw std::runtime_error("onnxruntime 1.17 or newer is needed, but this is " +
                               std::string(base->GetVersionString()) + ".");
    }
    ort::Env* env = nullptr;
    check(api_, ort::CreateEnv(api_, ort::kLogWarning, "gapa_run", &env));
    env_ = own(api_, env, ort::ReleaseEnv);
    ort::SessionOptions* raw_options = nullptr;
    check(api_, ort::CreateSessionOptions(api_, &raw_options));
    const auto options = own(api_, raw_options, ort::ReleaseSessionOptions);
    if (!arguments.library.empty()) {
      using Register = ort::Status*(ort::SessionOptions*, const ort::ApiBase*);
      check(api_, load<Register>(arguments.library, "RegisterCustomOps")(options.get(), base));
    }
    ort::Session* session = nullptr;
    check(api_,
          ort::CreateSession(api_, env_.get(), arguments.model.c_str(), options.get(), &session));
    session_ = own(api_, session, ort::ReleaseSession);
    input_names_ = names(ort::SessionGetInputCount, ort::SessionGetInputName);
    output_names_ = names(ort::SessionGetOutputCount, ort::SessionGetOutputName);
  }

  const std::vector<std::string>& input_names() const { return input_names_; }

  std::vector<Tensor> run(const std::vector<Array>& arrays) const {
    ort::MemoryInfo* raw_memory = nullptr;
    check(api_,
          ort::CreateCpuMemoryInfo(api_, ort::kArenaAllocator, ort::kDefaultMemory, &raw_memory));
    const auto memory = own(api_, raw_memory, ort::ReleaseMemoryInfo);
    std::vector<std::vector<float>> floats(arrays.size());  // alive until the run is over
    std::vector<Owned<ort::Value>> held;
    std::vector<const ort::Value*> inputs;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const Array& array = arrays[i];
      const int type = input_type(i);
      const void* data = array.values.data();
      size_t bytes = array.values.size() * sizeof(double);
      if (type == ort::kFloat) {
        floats[i].assign(array.values.begin(), array.values.end());
        data = floats[i].data();
        bytes = floats[i].size() * sizeof(float);
      } else if (type != ort::kDouble) {
        throw std::runtime_error("input '" + input_names_[i] +
                                 "' of the model is neither float32 " +
                                 "nor float64; gapa_run feeds no other type.");
      }
      ort::Value* value = nullptr;
      check(api_, ort::CreateTensorWithDataAsOrtValue(api_, memory.get(), const_cast<void*>(data),
                                                      bytes, array.shape.data(), array.shape.size(),
                                                      type, &value));
      held.push_back(own(api_, value, ort::ReleaseValue));
      inputs.push_back(value);
    }
    const std::vector<const char*> feeds = c_strings(input_names_);
    const std::vector<const char*> fetches = c_strings(output_names_);
    std::vector<ort::Value*> raw_outputs(fetches.size(), nullptr);
    check(api_, ort::Run(api_, session_.get(), nullptr, feeds.data(), inputs.data(), inputs.size(),
                         fetches.data(), fetches.size(), raw_outputs.data()));
    for (ort::Value* value : raw_outputs) held.push_back(own(api_, value, ort::ReleaseValue));
    std::vector<Tensor> outputs;
    for (size_t i = 0; i < raw_outputs.size(); ++i) {
      outputs.push_back(read(output_names_[i], raw_outputs[i]));
    }
    return outputs;
  }

 private:
  template <typename Count, typename Name>
  std::vector<std::string> names(const Count& count_of, const Name& name_of) const {
    ort::AllocatorHandle* allocator = nullptr;  // onnxruntime's own, not to be released
    check(api_, ort::GetAllocatorWithDefaultOptions(api_, &allocator));
    size_t count = 0;
    check(api_, count_of(api_, session_.get(), &count));
    std::vector<std::string> result;
    for (size_t i = 0; i < count; ++i) {
      char* name = nullptr;
      check(api_, name_of(api_, session_.get(), i, allocator, &name));
      result.emplace_back(name);
      check(api_, ort::AllocatorFree(api_, allocator, name));
    }
    return result;
  }

  int input_type(size_t i) const {
    ort::TypeInfo* raw = nullptr;
    check(api_, ort::SessionGetInputTypeInfo(api_, session_.get(), i, &raw));
    const auto held = own(api_, raw, ort::ReleaseTypeInfo);
    const ort::TensorInfo* tensor = nullptr;
    check(api_, ort::CastTypeInfoToTensorInfo(api_, raw, &tensor));
    int type = 0;
    if (tensor != nullptr) check(api_, ort::GetTensorElementType(api_, tensor, &type));
    return type;
  }

  Tensor read(const std::string& name, ort::Value* value) const {
    Tensor tensor;
    tensor.name = name;
    int is_tensor = 0;
    check(api_, ort::IsTensor(api_, value, &is_tensor));
    if (!is_tensor) return tensor;
    ort::TensorInfo* raw = nullptr;
    check(api_, ort::GetTensorTypeAndShape(api_, value, &raw));
    const auto info = own(api_, raw, ort::ReleaseTensorTypeAndShapeInfo);
    check(api_, ort::GetTensorElementType(api_, raw, &tensor.type));
    size_t rank = 0;
    check(api_, ort::GetDimensionsCount(api_, raw, &rank));
    tensor.shape.resize(rank);
    check(api_, ort::GetDimensions(api_, raw, tensor.shape.data(), rank));
    int64_t count = 1;
    for (const int64_t dim : tensor.shape) count *= dim;
    void* data = nullptr;
    check(api_, ort::GetTensorMutableData(api_, value, &data));
    switch (tensor.type) {
      case ort::kFloat:
        tensor.values = widen<float>(data, count);
        break;
      case ort::kDouble:
        tensor.values = widen<double>(data, count);
        break;
      case ort::kInt32:
        tensor.values = widen<int32_t>(data, count);
        break;
      case ort::kInt64:
        tensor.values = widen<int64_t>(data, count);
        break;
      case ort::kUint8:
        tensor.values = widen<uint8_t>(data, count);
        break;
      case ort::kBool:
        tensor.values = widen<bool>(data, count);
        break;
      default:
        break;
    }
    return tensor;
  }

  static std::vector<const char*> c_strings(const std::vector<std::string>& strings) {
    std::vector<const char*> result;
    for (const std::string& text : strings) result.push_back(text.c_str());
    return result;
  }

  const ort::Api* api_ = nullptr;
  Owned<ort::Env> env_;  // before the session: released after it
  Owned<ort::Session> session_;
  std::vector<std::string> input_names_, output_names_;
};

std::string title(const Tensor& tensor) {
  std::string text = tensor.name + "  (";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return text + ")";
}

/// One line per row of the last axis; with a variance, every number as mean ± std.
void print(const Tensor& mean, const Tensor* variance, int64_t row_limit) {
  std::printf("%s%s\n", title(mean).c_str(), variance ? "  mean ± std" : "");
  if (mean.values.empty()) {
    std::printf("  %s\n", mean.type == 0 || mean.columns() != 0 ? "(nothing to print)" : "(empty)");
    return;
  }
  const int64_t columns = mean.columns();
  const int64_t rows = static_cast<int64_t>(mean.values.size()) / columns;
  const int64_t shown = row_limit == 0 ? rows : std::min(rows, row_limit);
  for (int64_t row = 0; row < shown; ++row) {
    std::printf("  %6lld |", static_cast<long long>(row));
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      std::printf(" %13.7g", mean.values[i]);
      if (variance) std::printf(" ± %-13.7g", std::sqrt(variance->values[i]));
    }
    std::printf("\n");
  }
  if (shown < rows) {
    std::printf("  … %lld more rows (--rows 0 shows all)\n", static_cast<long long>(rows - shown));
  }
}

/// y_var of the same shape, which is then shown beside y and not by itself.
const Tensor* variance_of(const Tensor& mean, const std::vector<Tensor>& outputs) {
  for (const Tensor& other : outputs) {
    if (other.name == mean.name + "_var" && other.shape == mean.shape && !other.values.empty()) {
      return &other;
    }
  }
  return nullptr;
}

int run(const Arguments& arguments) {
  using GetApiBase = const ort::ApiBase*();
  const ort::ApiBase* base = load<GetApiBase>(arguments.onnxruntime, "OrtGetApiBase")();
  const Model model(base, arguments);
  if (model.input_names().size() != arguments.inputs.size()) {
    std::string names;
    for (const std::string& name : model.input_names()) names += " '" + name + "'";
    throw std::runtime_error("the model has " + std::to_string(model.input_names().size()) +
                             " inputs (" + names.substr(names.empty() ? 0 : 1) + "), but " +
                             std::to_string(arguments.inputs.size()) + " files were given.");
  }
  std::vector<Array> arrays;
  for (const std::string& path : arguments.inputs) arrays.push_back(gapa_run::read_npy(path));
  const std::vector<Tensor> outputs = model.run(arrays);

  std::printf("onnxruntime %s, %s\n", base->GetVersionString(),
              arguments.library.empty() ? "portable (no native library)" : "native library");
  for (const Tensor& output : outputs) {
    const bool beside_its_mean =
        std::any_of(outputs.begin(), outputs.end(),
                    [&](const Tensor& mean) { return variance_of(mean, outputs) == &output; });
    if (!beside_its_mean) print(output, variance_of(output, outputs), arguments.rows);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "error: %s\n%s", error.what(), kUsage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
