/* Calls of the C library that change files, counted, and one of them ended otherwise.
 *
 * Loaded before the C library. Until gapa_fault() names a folder everything is as ever. From then on each call that
 * changes something below the folder has a number, from 1. That with the number `at` kills the process where `failure`
 * is 0 (a write after half of its bytes), or fails with that error number; with `forever` all later ones fail as well.
 * gapa_clock() makes the wall clock go back by so many seconds at each look at it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_length;
static long wanted;
static int failure, forever;
static atomic_long calls;
static long step;
static atomic_long looks;
static char names[1 << 16];
static size_t names_length;

void gapa_fault(const char* path, long at, int error, int go_on) {
  strncpy(folder, path, sizeof folder - 1);
  folder_length = strlen(folder);
  wanted = at;
  failure = error;
  forever = go_on;
}

/* The names of the calls so far, a line each. */
const char* gapa_calls(void) { return names; }

void gapa_clock(long seconds) { step = seconds; }

static int below(const char* path) {
  return folder_length && !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int path_is_ours(int directory, const char* path) {
  if (!folder_length || !path) return 0;
  if (path[0] == '/') return below(path);
  char link[64], place[PATH_MAX];
  snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
  ssize_t length = readlink(link, place, sizeof place - 1);
  if (length < 0) return 0;
  place[length] = 0;
  return below(place);
}

static int file_is_ours(int file) {
  if (!folder_length) return 0;
  char link[64], place[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, place, sizeof place - 1);
  if (length < 0) return 0;
  place[length] = 0;
  return below(place);
}

/* Whether this call ends here: 0, go on; 1, it fails, and errno says why; 2, the process is to die. */
static int ends(const char* name) {
  long number = atomic_fetch_add(&calls, 1) + 1;
  size_t length = strlen(name);
  if (names_length + length + 2 < sizeof names) {
    memcpy(names + names_length, name, length);
    names_length += length;
    names[names_length++] = '\n';
  }
  if (!wanted || number < wanted || (number > wanted && !forever)) return 0;
  if (!failure) return 2;
  errno = failure;
  return 1;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define CALL(ours, name)             \
  if (ours) switch (ends(#name)) {   \
      case 1: return -1;             \
      case 2: die();                 \
    }

#define OPEN(name)                                                                          \
  int name(const char* path, int flags, ...) {                                              \
    va_list more;                                                                           \
    va_start(more, flags);                                                                  \
    mode_t mode = va_arg(more, mode_t);                                                     \
    va_end(more);                                                                           \
    CALL((flags & (O_WRONLY | O_RDWR | O_CREAT)) && path_is_ours(AT_FDCWD, path), open);    \
    return REAL(int, name, const char*, int, ...)(path, flags, mode);                       \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                        \
  int name(int directory, const char* path, int flags, ...) {                               \
    va_list more;                                                                           \
    va_start(more, flags);                                                                  \
    mode_t mode = va_arg(more, mode_t);                                                     \
    va_end(more);                                                                           \
    CALL((flags & (O_WRONLY | O_RDWR | O_CREAT)) && path_is_ours(directory, path), open);   \
    return REAL(int, name, int, const char*, int, ...)(directory, path, flags, mode);       \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void* bytes, size_t count) {
  ssize_t (*real)(int, const void*, size_t) = REAL(ssize_t, write, int, const void*, size_t);
  if (file_is_ours(file)) switch (ends("write")) {
      case 1: return -1;
      case 2: real(file, bytes, count / 2); die();
    }
  return real(file, bytes, count);
}

ssize_t writev(int file, const struct iovec* parts, int count) {
  CALL(file_is_ours(file), writev);
  return REAL(ssize_t, writev, int, const struct iovec*, int)(file, parts, count);
}

#define PWRITE(name, offset_type)                                                                        \
  ssize_t name(int file, const void* bytes, size_t count, offset_type offset) {                          \
    CALL(file_is_ours(file), pwrite);                                                                    \
    return REAL(ssize_t, name, int, const void*, size_t, offset_type)(file, bytes, count, offset);       \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define SENDFILE(name, offset_type)                                                         \
  ssize_t name(int out, int in, offset_type* offset, size_t count) {                        \
    ssize_t (*real)(int, int, offset_type*, size_t) =                                       \
        REAL(ssize_t, name, int, int, offset_type*, size_t);                                \
    if (file_is_ours(out)) switch (ends("sendfile")) {                                      \
        case 1: return -1;                                                                  \
        case 2: real(out, in, offset, count / 2); die();                                    \
      }                                                                                     \
    return real(out, in, offset, count);                                                    \
  }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t count, unsigned flags) {
  CALL(file_is_ours(out), copy_file_range);
  return REAL(ssize_t, copy_file_range, int, off64_t*, int, off64_t*, size_t, unsigned)(in, from, out, to, count, flags);
}

#define OF_FILE(name, parameters, arguments, ...)             \
  int name parameters {                                       \
    CALL(file_is_ours(file), name);                           \
    return REAL(int, name, __VA_ARGS__) arguments;            \
  }
OF_FILE(fsync, (int file), (file), int)
OF_FILE(fdatasync, (int file), (file), int)
OF_FILE(fchmod, (int file, mode_t mode), (file, mode), int, mode_t)
OF_FILE(fchown, (int file, uid_t user, gid_t group), (file, user, group), int, uid_t, gid_t)
OF_FILE(ftruncate, (int file, off_t length), (file, length), int, off_t)
OF_FILE(ftruncate64, (int file, off64_t length), (file, length), int, off64_t)

#define OF_PATH(name, parameters, arguments, ...)             \
  int name parameters {                                       \
    CALL(path_is_ours(AT_FDCWD, path), name);                 \
    return REAL(int, name, __VA_ARGS__) arguments;            \
  }
OF_PATH(unlink, (const char* path), (path), const char*)
OF_PATH(rmdir, (const char* path), (path), const char*)
OF_PATH(mkdir, (const char* path, mode_t mode), (path, mode), const char*, mode_t)
OF_PATH(chmod, (const char* path, mode_t mode), (path, mode), const char*, mode_t)
OF_PATH(chown, (const char* path, uid_t user, gid_t group), (path, user, group), const char*, uid_t, gid_t)
OF_PATH(rename, (const char* path, const char* new_path), (path, new_path), const char*, const char*)
OF_PATH(link, (const char* path, const char* new_path), (path, new_path), const char*, const char*)

#define AT_PATH(name, parameters, arguments, ...)             \
  int name parameters {                                       \
    CALL(path_is_ours(directory, path), name);                \
    return REAL(int, name, __VA_ARGS__) arguments;            \
  }
AT_PATH(unlinkat, (int directory, const char* path, int flags), (directory, path, flags), int, const char*, int)
AT_PATH(mkdirat, (int directory, const char* path, mode_t mode), (directory, path, mode), int, const char*, mode_t)
AT_PATH(fchmodat, (int directory, const char* path, mode_t mode, int flags), (directory, path, mode, flags), int,
        const char*, mode_t, int)
AT_PATH(fchownat, (int directory, const char* path, uid_t user, gid_t group, int flags),
        (directory, path, user, group, flags), int, const char*, uid_t, gid_t, int)
AT_PATH(renameat, (int directory, const char* path, int other, const char* new_path),
        (directory, path, other, new_path), int, const char*, int, const char*)
AT_PATH(linkat, (int directory, const char* path, int other, const char* new_path, int flags),
        (directory, path, other, new_path, flags), int, const char*, int, const char*, int)

int clock_gettime(clockid_t clock, struct timespec* now) {
  int result = REAL(int, clock_gettime, clockid_t, struct timespec*)(clock, now);
  if (step && clock == CLOCK_REALTIME && !result) now->tv_sec -= step * atomic_fetch_add(&looks, 1);
  return result;
}
