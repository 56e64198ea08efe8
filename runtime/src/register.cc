// The library's entry point: RegisterCustomOps, as onnxruntime calls it.
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gapa/ort_abi.h"
#include "gapa_activation/schema.h"
#include "gapa_split/schema.h"
#include "operator.h"
#include "status.h"

namespace gapa {
namespace {

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
const std::vector<OpSchema>& schemas() {
  static const auto& all = *new const std::vector<OpSchema>([] {
    std::vector<OpSchema> found = activation_schemas();
    found.push_back(split_schema());
    return found;
  }());
  return all;
}

/// Sessions refer to the domain and its operators for as long as they live, so these are never
/// released. A process may hold several copies of onnxruntime: one domain for each.
ort::CustomOpDomain* domain_for(const ort::Api* api) {
  struct Registration {
    ort::CustomOpDomain* domain = nullptr;
    std::vector<std::unique_ptr<RegisteredOp>> ops;
  };
  static auto& registrations = *new std::map<const ort::Api*, Registration>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  Registration& registration = registrations[api];
  if (registration.domain == nullptr) {
    ort::CustomOpDomain* domain = nullptr;
    check(api, ort::CreateCustomOpDomain(api, kDomain, &domain));
    for (const OpSchema& schema : schemas()) {
      registration.ops.push_back(std::make_unique<RegisteredOp>(api, &schema));
      check(api, ort::CustomOpDomain_Add(api, domain, registration.ops.back().get()));
    }
    registration.domain = domain;
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

extern "C" __attribute__((visibility("default"))) gapa::ort::Status* RegisterCustomOps(
    gapa::ort::SessionOptions* options, const gapa::ort::ApiBase* base) {
  using namespace gapa;
  const ort::Api* first_api = base->GetApi(1);  // enough to create a status in any release
  return guarded(first_api, "gapa-onnx", [&] {
    const std::string why = refusal(base->GetVersionString());
    if (!why.empty()) throw ModelError(why);
    const ort::Api* api = base->GetApi(ort::kOldestVersion);
    if (api == nullptr) throw ModelError("gapa-onnx: onnxruntime does not offer its C API 17.");
    check(api, ort::AddCustomOpDomain(api, options, domain_for(api)));
  });
}
