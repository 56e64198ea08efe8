// The library's entry point: RegisterCustomOps, as onnxruntime calls it.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gapa/ort_abi.h"
#include "gapa_activation/schema.h"
#include "gapa_classes/schema.h"
#include "gapa_leading/schema.h"
#include "operator.h"
#include "status.h"

namespace gapa {
namespace {

constexpr const char* kMostNeighboursKey = "ai.gapa.k";
constexpr const char* kMostNeighboursVariable = "GAPA_ONNX_K";
constexpr size_t kMostDigits = 18;  // of a number that certainly fits

/// One operator as onnxruntime sees it; the callbacks get it back as their first argument.
struct RegisteredOp : ort::CustomOp {
  const ort::Api* api;
  const OpSchema* schema;

  RegisteredOp(const ort::Api* api, const OpSchema* schema)
      : ort::CustomOp{}, api(api), schema(schema) {
    version = ort::kOldestVersion;
    GetName = [](const CustomOp* op) { return of(op).schema->name; };
    GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
    GetInputType = [](const CustomOp* op, size_t i) -> int {
      return of(op).schema->inputs[i].type;
    };
    GetInputTypeCount = [](const CustomOp* op) { return of(op).schema->inputs.size(); };
    GetOutputType = [](const CustomOp* op, size_t i) -> int {
      return of(op).schema->outputs[i].type;
    };
    GetOutputTypeCount = [](const CustomOp* op) { return of(op).schema->outputs.size(); };
    GetInputCharacteristic = [](const CustomOp*, size_t) -> int { return ort::kRequired; };
    GetOutputCharacteristic = [](const CustomOp*, size_t i) -> int {
      return i == 0 ? ort::kRequired : ort::kOptional;
    };
    GetInputMemoryType = [](const CustomOp*, size_t) -> int { return ort::kDefaultMemory; };
    GetVariadicInputMinArity = [](const CustomOp*) { return 1; };
    GetVariadicInputHomogeneity = [](const CustomOp*) { return 1; };
    GetVariadicOutputMinArity = [](const CustomOp*) { return 1; };
    GetVariadicOutputHomogeneity = [](const CustomOp*) { return 1; };
    CreateKernelV2 = create;
    KernelComputeV2 = compute;
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    InferOutputShapeFn = [](const CustomOp* op, ort::ShapeInferContext* context) {
      const OpSchema& schema = *of(op).schema;
      return guarded(of(op).api, schema.name, [&] { schema.infer_shapes(of(op).api, context); });
    };
    GetStartVersion = [](const CustomOp*) { return kDomainVersion; };
    GetEndVersion = [](const CustomOp*) { return kDomainVersion; };
  }

 private:
  static const RegisteredOp& of(const CustomOp* op) {
    return *static_cast<const RegisteredOp*>(op);
  }

  static ort::Status* create(const CustomOp* op, const ort::Api* api, const ort::KernelInfo* info,
                             void** kernel) {
    const OpSchema& schema = *of(op).schema;
    return guarded(api, schema.name, [&] { *kernel = schema.create(api, info, schema).release(); });
  }

  static ort::Status* compute(void* kernel, ort::KernelContext* context) {
    const Kernel& self = *static_cast<const Kernel*>(kernel);
    return guarded(self.api(), self.name(), [&] { self.compute(context); });
  }
};

/// All operators, in the order in which they are registered.
std::vector<OpSchema> schemas(int64_t most_neighbours) {
  std::vector<OpSchema> all = activation_schemas();
  all.push_back(classes_schema());
  all.push_back(leading_schema());
  for (OpSchema& schema : all) schema.most_neighbours = most_neighbours;
  return all;
}

/// A session's config entry; false where it has none of this name.
bool config_entry(const ort::Api* api, const ort::SessionOptions* options, const char* key,
                  std::string* text) {
  int is_there = 0;
  check(api, ort::HasSessionConfigEntry(api, options, key, &is_there));
  if (!is_there) return false;
  size_t size = 0;
  check(api, ort::GetSessionConfigEntry(api, options, key, nullptr, &size));
  text->assign(size, '\0');
  check(api, ort::GetSessionConfigEntry(api, options, key, text->data(), &size));
  text->resize(size > 0 ? size - 1 : 0);
  return true;
}

/// What k of a session's operators is lowered to: by its config entry `ai.gapa.k`, else, for
/// servers that set none, by the environment variable GAPA_ONNX_K, where it is not empty.
int64_t most_neighbours(const ort::Api* api, const ort::SessionOptions* options) {
  std::string text;
  std::string where = std::string("session config entry '") + kMostNeighboursKey + "'";
  if (!config_entry(api, options, kMostNeighboursKey, &text)) {
    const char* set = std::getenv(kMostNeighboursVariable);
    if (set == nullptr || *set == '\0') return std::numeric_limits<int64_t>::max();
    text = set;
    where = std::string("environment variable ") + kMostNeighboursVariable;
  }
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  const int64_t k = digits && text.size() <= kMostDigits ? std::stoll(text) : 0;
  if (k < 1) {
    throw ModelError("gapa-onnx: the " + where +
                     " must be a whole number of neighbours, at least 1, but is '" + text + "'.");
  }
  return k;
}

/// Sessions refer to the domain and its operators for as long as they live, so these are never
/// released. A process may hold several copies of onnxruntime, and sessions that differ in their
/// most neighbours: one domain for each.
ort::CustomOpDomain* domain_for(const ort::Api* api, int64_t most_neighbours) {
  struct Registration {
    ort::CustomOpDomain* domain = nullptr;
    std::vector<OpSchema> schemas;
    std::vector<std::unique_ptr<RegisteredOp>> ops;
  };
  static auto& registrations = *new std::map<std::pair<const ort::Api*, int64_t>, Registration>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  Registration& registration = registrations[{api, most_neighbours}];
  if (registration.domain == nullptr) {
    // Kept when all of it is there: who fails half-way starts afresh the next time.
    Registration made;
    ort::CustomOpDomain* domain = nullptr;
    check(api, ort::CreateCustomOpDomain(api, kDomain, &domain));
    const auto release = [api](ort::CustomOpDomain* held) {
      ort::ReleaseCustomOpDomain(api, held);
    };
    std::unique_ptr<ort::CustomOpDomain, decltype(release)> held(domain, release);
    made.schemas = schemas(most_neighbours);
    for (const OpSchema& schema : made.schemas) {
      made.ops.push_back(std::make_unique<RegisteredOp>(api, &schema));
      check(api, ort::CustomOpDomain_Add(api, domain, made.ops.back().get()));
    }
    made.domain = held.release();
    registration = std::move(made);
  }
  return registration.domain;
}

/// The refusal of a runtime that lacks the thread pool or the status-returning callbacks, or "".
std::string refusal(const char* version) {
  int major = 0, minor = 0;
  const bool known = version != nullptr && std::sscanf(version, "%d.%d", &major, &minor) == 2;
  if (known && (major > 1 || (major == 1 && minor >= static_cast<int>(ort::kOldestVersion)))) {
    return "";
  }
  return "gapa-onnx: the native library needs onnxruntime 1.17 or newer, but this is " +
         std::string(version ? version : "of unknown version") +
         "; without the library the same file still runs.";
}

}  // namespace
}  // namespace gapa

#if defined(_WIN32)
#define GAPA_EXPORTED __declspec(dllexport)
#else
#define GAPA_EXPORTED __attribute__((visibility("default")))
#endif

extern "C" GAPA_EXPORTED gapa::ort::Status* RegisterCustomOps(gapa::ort::SessionOptions* options,
                                                              const gapa::ort::ApiBase* base) {
  using namespace gapa;
  const ort::Api* first_api = base->GetApi(1);  // enough to create a status in any release
  return guarded(first_api, "gapa-onnx", [&] {
    const std::string why = refusal(base->GetVersionString());
    if (!why.empty()) throw ModelError(why);
    const ort::Api* api = base->GetApi(ort::kOldestVersion);
    if (api == nullptr) throw ModelError("gapa-onnx: onnxruntime does not offer its C API 17.");
    check(api,
          ort::AddCustomOpDomain(api, options, domain_for(api, most_neighbours(api, options))));
  });
}
