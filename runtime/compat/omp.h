// In place of OpenMP's header, where FAISS is compiled without OpenMP: see src/serial_openmp.cc.
#pragma once

extern "C" {
typedef struct {
  void* unused;
} omp_lock_t;

int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
int omp_get_nested();
void omp_set_nested(int);
void omp_set_num_threads(int);
void omp_init_lock(omp_lock_t*);
void omp_destroy_lock(omp_lock_t*);
void omp_set_lock(omp_lock_t*);
void omp_unset_lock(omp_lock_t*);
}
