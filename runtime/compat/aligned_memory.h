// On Windows, which has no posix_memalign: included before all else in what uses FAISS, behind the
// header of it that names the function to free with.
#pragma once

#include <errno.h>
#include <malloc.h>

#undef posix_memalign_free
#define posix_memalign_free _aligned_free

inline int posix_memalign(void** to, size_t alignment, size_t size) {
  *to = _aligned_malloc(size, alignment);
  return *to != nullptr ? 0 : ENOMEM;
}
