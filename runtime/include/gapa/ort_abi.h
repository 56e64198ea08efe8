// The part of onnxruntime's C interface that this project calls.
//
// OrtApi is a table of function pointers that only ever grows at its end, so the slot of a function
// is as stable as its name. No package ships the headers; this file names the slots we call, each
// with its index, and nothing else. A slot is called like a function, with the table first:
//
//   ort::CreateStatus(api, ort::kFail, "no such file")
//
// Functions that return Status* return nullptr on success.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gapa::ort {

struct Api {
  void* slot[1];  ///< really some hundred; which ones exist depends on the version
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);  ///< nullptr if the runtime is older than `version`
  const char* (*GetVersionString)();       ///< such as "1.20.1"
};

// Owned by onnxruntime, opaque to us.
struct AllocatorHandle;
struct CustomOpDomain;
struct Env;
struct KernelContext;
struct KernelInfo;
struct MemoryInfo;
struct RunOptions;
struct Session;
struct SessionOptions;
struct ShapeInferContext;
struct Status;
struct TensorInfo;
struct TypeInfo;
struct Value;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };
enum ElementType : int {
  kFloat = 1,
  kUint8 = 2,
  kInt32 = 6,
  kInt64 = 7,
  kBool = 9,
  kDouble = 11,
};
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum LogLevel : int { kLogWarning = 2 };
enum AllocatorType : int { kArenaAllocator = 1 };
enum MemoryType : int { kDefaultMemory = 0 };

template <size_t Index, typename Function>
struct Slot;

template <size_t Index, typename Result, typename... Arguments>
struct Slot<Index, Result(Arguments...)> {
  Result operator()(const Api* api, Arguments... arguments) const {
    auto* function = reinterpret_cast<Result (*)(Arguments...)>(table(api)[Index]);
    return function(arguments...);
  }

 private:
  static void* const* table(const Api* api) { return reinterpret_cast<void* const*>(api); }
};

inline constexpr Slot<0, Status*(int code, const char* message)> CreateStatus{};
inline constexpr Slot<2, const char*(const Status*)> GetErrorMessage{};
inline constexpr Slot<3, Status*(int log_level, const char* log_id, Env**)> CreateEnv{};
inline constexpr Slot<7, Status*(const Env*, const char* path, const SessionOptions*, Session**)>
    CreateSession{};
inline constexpr Slot<9, Status*(Session*, const RunOptions*, const char* const* input_names,
                                 const Value* const* inputs, size_t input_count,
                                 const char* const* output_names, size_t output_count, Value**)>
    Run{};
inline constexpr Slot<10, Status*(SessionOptions**)> CreateSessionOptions{};
inline constexpr Slot<26, Status*(const char* domain, CustomOpDomain**)> CreateCustomOpDomain{};
struct CustomOp;
inline constexpr Slot<27, Status*(CustomOpDomain*, const CustomOp*)> CustomOpDomain_Add{};
inline constexpr Slot<28, Status*(SessionOptions*, CustomOpDomain*)> AddCustomOpDomain{};
inline constexpr Slot<30, Status*(const Session*, size_t*)> SessionGetInputCount{};
inline constexpr Slot<31, Status*(const Session*, size_t*)> SessionGetOutputCount{};
inline constexpr Slot<33, Status*(const Session*, size_t, TypeInfo**)> SessionGetInputTypeInfo{};
inline constexpr Slot<36, Status*(const Session*, size_t, AllocatorHandle*, char**)>
    SessionGetInputName{};
inline constexpr Slot<37, Status*(const Session*, size_t, AllocatorHandle*, char**)>
    SessionGetOutputName{};
inline constexpr Slot<49, Status*(const MemoryInfo*, void* data, size_t bytes, const int64_t* dims,
                                  size_t rank, int element_type, Value**)>
    CreateTensorWithDataAsOrtValue{};
inline constexpr Slot<50, Status*(const Value*, int* is_tensor)> IsTensor{};
inline constexpr Slot<51, Status*(Value*, void**)> GetTensorMutableData{};
/// The result belongs to the TypeInfo; nullptr if that is no tensor.
inline constexpr Slot<55, Status*(const TypeInfo*, const TensorInfo**)> CastTypeInfoToTensorInfo{};
inline constexpr Slot<57, Status*(TensorInfo**)> CreateTensorTypeAndShapeInfo{};
inline constexpr Slot<58, Status*(TensorInfo*, int element_type)> SetTensorElementType{};
inline constexpr Slot<59, Status*(TensorInfo*, const int64_t*, size_t rank)> SetDimensions{};
inline constexpr Slot<60, Status*(const TensorInfo*, int* element_type)> GetTensorElementType{};
inline constexpr Slot<61, Status*(const TensorInfo*, size_t* rank)> GetDimensionsCount{};
inline constexpr Slot<62, Status*(const TensorInfo*, int64_t*, size_t rank)> GetDimensions{};
inline constexpr Slot<63, Status*(const TensorInfo*, const char**, size_t rank)>
    GetSymbolicDimensions{};
inline constexpr Slot<65, Status*(const Value*, TensorInfo**)> GetTensorTypeAndShape{};
inline constexpr Slot<69, Status*(int allocator_type, int memory_type, MemoryInfo**)>
    CreateCpuMemoryInfo{};
inline constexpr Slot<76, Status*(AllocatorHandle*, void*)> AllocatorFree{};
inline constexpr Slot<78, Status*(AllocatorHandle**)> GetAllocatorWithDefaultOptions{};
inline constexpr Slot<89, Status*(const KernelContext*, size_t*)> KernelContext_GetOutputCount{};
inline constexpr Slot<90, Status*(const KernelContext*, size_t, const Value**)>
    KernelContext_GetInput{};
/// The value is nullptr for an output that nobody asked for.
inline constexpr Slot<91,
                      Status*(KernelContext*, size_t, const int64_t* dims, size_t rank, Value**)>
    KernelContext_GetOutput{};
inline constexpr Slot<92, void(Env*)> ReleaseEnv{};
inline constexpr Slot<93, void(Status*)> ReleaseStatus{};
inline constexpr Slot<94, void(MemoryInfo*)> ReleaseMemoryInfo{};
inline constexpr Slot<95, void(Session*)> ReleaseSession{};
inline constexpr Slot<96, void(Value*)> ReleaseValue{};
inline constexpr Slot<98, void(TypeInfo*)> ReleaseTypeInfo{};
inline constexpr Slot<99, void(TensorInfo*)> ReleaseTensorTypeAndShapeInfo{};
inline constexpr Slot<100, void(SessionOptions*)> ReleaseSessionOptions{};
inline constexpr Slot<101, void(CustomOpDomain*)> ReleaseCustomOpDomain{};
/// Since 1.14.
inline constexpr Slot<237, Status*(const SessionOptions*, const char* key, int* is_there)>
    HasSessionConfigEntry{};
/// Since 1.14. `size` is that of the text with its end; with a null text it is only told.
inline constexpr Slot<238,
                      Status*(const SessionOptions*, const char* key, char* text, size_t* size)>
    GetSessionConfigEntry{};
/// Since 1.15. The value belongs to onnxruntime and lives as long as the kernel.
inline constexpr Slot<249, Status*(const KernelInfo*, size_t, int* is_constant, const Value**)>
    KernelInfoGetConstantInput_tensor{};
/// Since 1.17. The result belongs to the context.
inline constexpr Slot<268, Status*(const ShapeInferContext*, size_t, TensorInfo**)>
    ShapeInferContext_GetInputTypeShape{};
inline constexpr Slot<270, Status*(const ShapeInferContext*, size_t, const TensorInfo*)>
    ShapeInferContext_SetOutputTypeShape{};
inline constexpr Slot<271, Status*(TensorInfo*, const char**, size_t rank)> SetSymbolicDimensions{};
/// Since 1.17. Calls fn(data, i) for every i < total on the session's own threads.
inline constexpr Slot<274, Status*(const KernelContext*, void (*fn)(void* data, size_t i),
                                   size_t total, size_t batches, void* data)>
    KernelContext_ParallelFor{};

/// The first release that has every slot above and reads every field of CustomOp below.
inline constexpr uint32_t kOldestVersion = 17;

/// What onnxruntime reads of a custom operator, in the order of version 17 of the interface.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);  ///< unused: V2 below
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);  ///< nullptr is the CPU
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);  ///< unused: V2 below
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, ShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  // Read from version 18 of the interface on; here so that no reader can run past the end.
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // namespace gapa::ort
