#include "stand_in.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

namespace gapa::ort {

Value& Value::operator=(Value&& other) noexcept {
  std::swap(type, other.type);
  std::swap(shape, other.shape);
  std::swap(blocks, other.blocks);
  std::swap(bytes, other.bytes);
  std::swap(shift, other.shift);
  return *this;
}

Value::~Value() {
  for (uint8_t* block : blocks) std::free(block);
}

int64_t Value::count() const {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  return count;
}

void Value::allocate(int of_type, std::vector<int64_t> of_shape, int fill, size_t misaligned) {
  type = of_type;
  shape = std::move(of_shape);
  const size_t element = fuzz::size_of(type);
  bytes = static_cast<size_t>(count()) * element;
  shift = misaligned * element;
  for (uint8_t* block : blocks) std::free(block);
  blocks.assign(1, static_cast<uint8_t*>(std::malloc(bytes + shift)));
  if (blocks[0] == nullptr) throw std::bad_alloc();
  std::memset(blocks[0] + shift, fill, bytes);
}

}  // namespace gapa::ort

namespace gapa::fuzz {

using namespace ort;

Trouble& trouble() {
  static thread_local Trouble of_this_thread;
  return of_this_thread;
}

size_t size_of(int type) {
  switch (type) {
    case kFloat:
    case kInt32:
      return 4;
    case kInt64:
    case kDouble:
      return 8;
    case 10:  // float16
      return 2;
    default:
      return 1;
  }
}

namespace {

/// What the real one does while it makes its own objects is not the library's affair.
class OwnMemory {
 public:
  OwnMemory() : before_(trouble().in_library) { trouble().in_library = false; }
  ~OwnMemory() { trouble().in_library = before_; }

 private:
  bool before_;
};

Status* made_status(int code, const char* message) {
  const OwnMemory own;
  ++trouble().statuses_alive;
  return new Status{code, message};
}

/// A failure of the call at hand, if it is its turn.
Status* turn() {
  int& left = trouble().calls_until_failure;
  if (left < 0 || left-- != 0) return nullptr;
  return made_status(kFail, "the stand-in was told to fail here");
}

#define FAIL_IN_TURN                           \
  if (Status* const failed = turn(); failed) { \
    return failed;                             \
  }                                            \
  const OwnMemory own

Status* create_status(int code, const char* message) { return made_status(code, message); }
const char* error_message(const Status* status) { return status->message.c_str(); }
void release_status(Status* status) {
  --trouble().statuses_alive;
  delete status;
}

Status* create_domain(const char*, CustomOpDomain** domain) {
  FAIL_IN_TURN;
  *domain = new CustomOpDomain;
  return nullptr;
}
void release_domain(CustomOpDomain* domain) { delete domain; }
Status* add_op(CustomOpDomain* domain, const CustomOp* op) {
  FAIL_IN_TURN;
  domain->ops.push_back(op);
  return nullptr;
}
Status* add_domain(SessionOptions* options, CustomOpDomain* domain) {
  FAIL_IN_TURN;
  options->domain = domain;
  return nullptr;
}
Status* has_entry(const SessionOptions* options, const char*, int* there) {
  FAIL_IN_TURN;
  *there = options->most_neighbours.has_value();
  return nullptr;
}
Status* get_entry(const SessionOptions* options, const char*, char* text, size_t* size) {
  FAIL_IN_TURN;
  const std::string& value = *options->most_neighbours;
  if (text != nullptr) std::memcpy(text, value.c_str(), value.size() + 1);
  *size = value.size() + 1;
  return nullptr;
}

Status* mutable_data(Value* value, void** data) {
  FAIL_IN_TURN;
  *data = value->data();
  return nullptr;
}
Status* create_info(TensorInfo** info) {
  FAIL_IN_TURN;
  *info = new TensorInfo;
  return nullptr;
}
Status* set_type(TensorInfo* info, int type) {
  FAIL_IN_TURN;
  info->type = type;
  return nullptr;
}
Status* set_dims(TensorInfo* info, const int64_t* dims, size_t rank) {
  FAIL_IN_TURN;
  info->shape.assign(dims, dims + rank);
  return nullptr;
}
Status* set_names(TensorInfo* info, const char** names, size_t rank) {
  FAIL_IN_TURN;
  info->names.assign(names, names + rank);
  return nullptr;
}
Status* get_type(const TensorInfo* info, int* type) {
  FAIL_IN_TURN;
  *type = info->type;
  return nullptr;
}
Status* get_rank(const TensorInfo* info, size_t* rank) {
  FAIL_IN_TURN;
  *rank = info->shape.size();
  return nullptr;
}
Status* get_dims(const TensorInfo* info, int64_t* dims, size_t rank) {
  FAIL_IN_TURN;
  std::copy_n(info->shape.begin(), rank, dims);
  return nullptr;
}
Status* get_names(const TensorInfo* info, const char** names, size_t rank) {
  FAIL_IN_TURN;
  for (size_t i = 0; i < rank; ++i) names[i] = info->names[i].c_str();
  return nullptr;
}
Status* type_and_shape(const Value* value, TensorInfo** info) {
  FAIL_IN_TURN;
  *info = new TensorInfo{value->type, value->shape, {}};
  return nullptr;
}
void release_info(TensorInfo* info) { delete info; }

Status* output_count(const KernelContext* context, size_t* count) {
  FAIL_IN_TURN;
  *count = context->output_count;
  return nullptr;
}
Status* get_input(const KernelContext* context, size_t which, const Value** value) {
  FAIL_IN_TURN;
  *value = which < context->inputs.size() ? context->inputs[which] : nullptr;
  return nullptr;
}
Status* get_output(KernelContext* context, size_t which, const int64_t* dims, size_t rank,
                   Value** value) {
  FAIL_IN_TURN;
  *value = nullptr;
  if (!(context->wanted >> which & 1)) return nullptr;
  int64_t size = 1;
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] < 0 || __builtin_mul_overflow(size, dims[i], &size)) {
      return made_status(kFail, "an output of an impossible shape");
    }
  }
  if (size > int64_t{1} << 26) return made_status(kFail, "an output that fits nowhere");
  // Bytes that are no answer to anything: whatever is left of them was not written.
  context->outputs[which].allocate(context->output_types[which], {dims, dims + rank}, kUnwritten,
                                   context->misaligned);
  context->made[which] = true;
  *value = &context->outputs[which];
  return nullptr;
}
Status* constant_input(const KernelInfo* info, size_t which, int* is_constant,
                       const Value** value) {
  FAIL_IN_TURN;
  const bool there = which < info->constants.size() && info->constants[which] != nullptr;
  *is_constant = there;
  *value = there ? info->constants[which] : nullptr;
  return nullptr;
}
Status* input_shape(const ShapeInferContext* context, size_t which, TensorInfo** info) {
  FAIL_IN_TURN;
  *info =
      which < context->inputs.size() ? const_cast<TensorInfo*>(&context->inputs[which]) : nullptr;
  return nullptr;
}
Status* set_output_shape(const ShapeInferContext* context, size_t which, const TensorInfo* info) {
  FAIL_IN_TURN;
  auto& outputs = const_cast<ShapeInferContext*>(context)->outputs;
  if (which >= outputs.size()) return made_status(kInvalidArgument, "no such output");
  outputs[which] = *info;
  return nullptr;
}

Status* parallel_for(const KernelContext* context, void (*fn)(void*, size_t), size_t total, size_t,
                     void* data) {
  if (Status* const failed = turn(); failed) return failed;
  if (context->pool > 1) {
    on_pool(context->pool, total, [&](size_t i) { fn(data, i); });
  } else {
    for (size_t i = 0; i < total; ++i) fn(data, context->pool < 0 ? total - 1 - i : i);
  }
  return nullptr;
}

const Api* api() {
  static const auto& table = *[] {
    auto* slots = new std::array<void*, 300>();
    const auto put = [&](size_t slot, auto* function) {
      (*slots)[slot] = reinterpret_cast<void*>(function);
    };
    put(0, create_status);
    put(2, error_message);
    put(26, create_domain);
    put(27, add_op);
    put(28, add_domain);
    put(51, mutable_data);
    put(57, create_info);
    put(58, set_type);
    put(59, set_dims);
    put(60, get_type);
    put(61, get_rank);
    put(62, get_dims);
    put(63, get_names);
    put(65, type_and_shape);
    put(89, output_count);
    put(90, get_input);
    put(91, get_output);
    put(93, release_status);
    put(99, release_info);
    put(101, release_domain);
    put(237, has_entry);
    put(238, get_entry);
    put(249, constant_input);
    put(268, input_shape);
    put(270, set_output_shape);
    put(271, set_names);
    put(274, parallel_for);
    return slots;
  }();
  return reinterpret_cast<const Api*>(table.data());
}

thread_local const char* version_at_hand = nullptr;

/// Workers that wait for jobs; whoever brings a job works on it too.
class Pool {
 public:
  void run(int threads, size_t count, const std::function<void(size_t)>& fn) {
    const auto job = std::make_shared<Job>(Job{fn, count});
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) {
        workers_.emplace_back([this] { work(); });
      }
      for (int i = 1; i < threads; ++i) jobs_.push_back(job);
    }
    wake_.notify_all();
    help(*job);
    std::unique_lock<std::mutex> lock(job->mutex);
    job->finished.wait(lock, [&] { return job->done == count; });
  }

 private:
  struct Job {
    Job(const std::function<void(size_t)>& fn, size_t count) : fn(fn), count(count) {}
    Job(Job&& other) : fn(other.fn), count(other.count) {}
    const std::function<void(size_t)>& fn;  ///< lives until all of it is done
    const size_t count;
    std::atomic<size_t> next{0};
    size_t done = 0;
    std::mutex mutex;
    std::condition_variable finished;
  };

  static void help(Job& job) {
    for (size_t i; (i = job.next++) < job.count;) {
      job.fn(i);
      const std::lock_guard<std::mutex> lock(job.mutex);
      if (++job.done == job.count) job.finished.notify_all();
    }
  }

  [[noreturn]] void work() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return !jobs_.empty(); });
        job = jobs_.front();
        jobs_.pop_front();
      }
      help(*job);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::deque<std::thread> workers_;
};

}  // namespace

const ApiBase* stand_in(const char* version) {
  version_at_hand = version;
  static const ApiBase base = {
      [](uint32_t wanted) -> const Api* { return wanted <= 20 ? api() : nullptr; },
      [] { return version_at_hand; }};
  return &base;
}

void on_pool(int threads, size_t count, const std::function<void(size_t)>& fn) {
  static auto& pool = *new Pool;  // its threads never end
  pool.run(threads, count, fn);
}

}  // namespace gapa::fuzz

namespace {

void* allocated(std::size_t size, std::size_t alignment) {
  gapa::fuzz::Trouble& trouble = gapa::fuzz::trouble();
  int& left = trouble.allocations_until_failure;
  if (trouble.in_library && left >= 0 && left-- == 0) throw std::bad_alloc();
  void* block = nullptr;
  if (alignment == 0) {
    block = std::malloc(size);
  } else if (posix_memalign(&block, alignment, size) != 0) {
    block = nullptr;
  }
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

}  // namespace

// Allocations may fail whenever a case says so.
void* operator new(std::size_t size) { return allocated(size, 0); }
void* operator new[](std::size_t size) { return allocated(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocated(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }
