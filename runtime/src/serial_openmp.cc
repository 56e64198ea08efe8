// A team of one: the OpenMP entry points that FAISS was compiled against.
//
// onnxruntime's rule is no OpenMP inside operators, and two OpenMP runtimes in one process crash.
// FAISS is called for one query at a time, so every parallel region runs on the calling thread.
// Several such threads may be inside FAISS at once; what it guards as critical stays guarded.
#include <mutex>

namespace {
// Recursive: a thread may meet a second critical section inside a first.
std::recursive_mutex& critical() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

bool whole_range(long start, long end, long step, long* first, long* last) {
  *first = start;
  *last = end;
  return step > 0 ? start < end : start > end;
}
}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) { body(data); }
void GOMP_barrier() {}
bool GOMP_single_start() { return true; }

void GOMP_critical_start() { critical().lock(); }
void GOMP_critical_end() { critical().unlock(); }
void GOMP_critical_name_start(void**) { critical().lock(); }
void GOMP_critical_name_end(void**) { critical().unlock(); }
void GOMP_atomic_start() { critical().lock(); }
void GOMP_atomic_end() { critical().unlock(); }

bool GOMP_loop_dynamic_start(long start, long end, long step, long, long* first, long* last) {
  return whole_range(start, end, step, first, last);
}
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long, long* first,
                                          long* last) {
  return whole_range(start, end, step, first, last);
}
bool GOMP_loop_guided_start(long start, long end, long step, long, long* first, long* last) {
  return whole_range(start, end, step, first, last);
}
bool GOMP_loop_nonmonotonic_guided_start(long start, long end, long step, long, long* first,
                                         long* last) {
  return whole_range(start, end, step, first, last);
}
bool GOMP_loop_dynamic_next(long*, long*) { return false; }
bool GOMP_loop_nonmonotonic_dynamic_next(long*, long*) { return false; }
bool GOMP_loop_guided_next(long*, long*) { return false; }
bool GOMP_loop_nonmonotonic_guided_next(long*, long*) { return false; }
void GOMP_loop_end() {}
void GOMP_loop_end_nowait() {}

int omp_get_max_threads() { return 1; }
int omp_get_num_threads() { return 1; }
int omp_get_thread_num() { return 0; }
int omp_in_parallel() { return 0; }
int omp_get_nested() { return 0; }
void omp_set_nested(int) {}
void omp_set_num_threads(int) {}

// Locks guard the nodes of a graph while it is built, which never happens here.
void omp_init_lock(void*) {}
void omp_destroy_lock(void*) {}
void omp_set_lock(void*) {}
void omp_unset_lock(void*) {}

}  // extern "C"
