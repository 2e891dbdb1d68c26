/* Fails the n-th call that opens, writes, syncs, renames, makes or maps a file below a directory, as SQLite's tests do.
 *
 * cc -shared -fPIC -o faults.so faults.c -ldl; LD_PRELOAD=faults.so python ...
 * fault_arm(prefix, n, mode), then the work, then fault_disarm(): the number of calls that were counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char prefix[PATH_MAX], failed[PATH_MAX + 64];
static long target;
static enum { ONCE, FULL, READ_ONLY } mode; /* READ_ONLY: from the n-th on, all calls that make something */
static atomic_int armed;
static atomic_long calls;

void fault_arm(const char *directory, long n, int how) {
  snprintf(prefix, sizeof prefix, "%s", directory);
  failed[0] = 0;
  target = n;
  mode = how;
  atomic_store(&calls, 0);
  atomic_store(&armed, 1);
}

long fault_disarm(void) {
  atomic_store(&armed, 0);
  return atomic_load(&calls);
}

const char *fault_failed(void) { return failed; }

static int below(const char *path) { return strncmp(path, prefix, strlen(prefix)) == 0; }

static int hit(const char *name, const char *path) {
  long n = atomic_fetch_add(&calls, 1) + 1;
  if (n != target && !(mode != ONCE && n > target)) return 0;
  if (mode == READ_ONLY && strcmp(name, "create") && strcmp(name, "rename") && strcmp(name, "mkdir")) return 0;
  if (!failed[0]) snprintf(failed, sizeof failed, "%s %s", name, path);
  return 1;
}

/* Whether a call on a path, or on an open file, is to fail. */
static int on_path(const char *name, int at, const char *path) {
  char whole[PATH_MAX * 2], link[64];
  if (!atomic_load(&armed) || path == NULL) return 0;
  if (path[0] == '/') {
    snprintf(whole, sizeof whole, "%s", path);
  } else {
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    if (length < 0) return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
  }
  return below(whole) && hit(name, whole);
}

static int on_file(const char *name, int file) {
  char path[PATH_MAX], link[64];
  if (!atomic_load(&armed)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path) && hit(name, path);
}

#define NEXT(type, name, ...) \
  static type (*next)(__VA_ARGS__); \
  if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAIL(number) \
  do { \
    errno = mode == READ_ONLY ? EROFS : number; \
    return -1; \
  } while (0)

#define OPEN(symbol) \
  int symbol(const char *path, int flags, ...) { \
    NEXT(int, #symbol, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t bits = va_arg(rest, mode_t); \
    va_end(rest); \
    int writes = flags & (O_CREAT | O_WRONLY | O_RDWR); \
    if (on_path(writes ? "create" : "open", AT_FDCWD, path)) FAIL(writes ? ENOSPC : EIO); \
    return next(path, flags, bits); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(symbol) \
  int symbol(int at, const char *path, int flags, ...) { \
    NEXT(int, #symbol, int, const char *, int, ...); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t bits = va_arg(rest, mode_t); \
    va_end(rest); \
    int writes = flags & (O_CREAT | O_WRONLY | O_RDWR); \
    if (on_path(writes ? "create" : "open", at, path)) FAIL(writes ? ENOSPC : EIO); \
    return next(at, path, flags, bits); \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
  NEXT(ssize_t, "write", int, const void *, size_t);
  if (on_file("write", file)) FAIL(ENOSPC);
  return next(file, data, size);
}

#define PWRITE(symbol) \
  ssize_t symbol(int file, const void *data, size_t size, off_t at) { \
    NEXT(ssize_t, #symbol, int, const void *, size_t, off_t); \
    if (on_file("write", file)) FAIL(ENOSPC); \
    return next(file, data, size, at); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int file, const struct iovec *data, int count) {
  NEXT(ssize_t, "writev", int, const struct iovec *, int);
  if (on_file("write", file)) FAIL(ENOSPC);
  return next(file, data, count);
}

#define SENDFILE(symbol) \
  ssize_t symbol(int out, int in, off_t *at, size_t size) { \
    NEXT(ssize_t, #symbol, int, int, off_t *, size_t); \
    if (on_file("write", out)) FAIL(ENOSPC); \
    return next(out, in, at, size); \
  }
SENDFILE(sendfile)
SENDFILE(sendfile64)

#define ON_FILE(symbol, number) \
  int symbol(int file) { \
    NEXT(int, #symbol, int); \
    if (on_file(#symbol, file)) FAIL(number); \
    return next(file); \
  }
ON_FILE(fsync, EIO)
ON_FILE(fdatasync, EIO)

int rename(const char *from, const char *to) {
  NEXT(int, "rename", const char *, const char *);
  if (on_path("rename", AT_FDCWD, to)) FAIL(EIO);
  return next(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
  NEXT(int, "renameat", int, const char *, int, const char *);
  if (on_path("rename", b, to)) FAIL(EIO);
  return next(a, from, b, to);
}

int mkdir(const char *path, mode_t bits) {
  NEXT(int, "mkdir", const char *, mode_t);
  if (on_path("mkdir", AT_FDCWD, path)) FAIL(ENOSPC);
  return next(path, bits);
}

int mkdirat(int at, const char *path, mode_t bits) {
  NEXT(int, "mkdirat", int, const char *, mode_t);
  if (on_path("mkdir", at, path)) FAIL(ENOSPC);
  return next(at, path, bits);
}

#define MMAP(symbol) \
  void *symbol(void *address, size_t size, int protection, int flags, int file, off_t at) { \
    NEXT(void *, #symbol, void *, size_t, int, int, int, off_t); \
    if (file >= 0 && on_file("mmap", file)) { \
      errno = ENOMEM; \
      return MAP_FAILED; \
    } \
    return next(address, size, protection, flags, file, at); \
  }
MMAP(mmap)
MMAP(mmap64)

#define FALLOCATE(symbol) \
  int symbol(int file, off_t at, off_t size) { \
    NEXT(int, #symbol, int, off_t, off_t); \
    if (on_file("fallocate", file)) return ENOSPC; \
    return next(file, at, size); \
  }
FALLOCATE(posix_fallocate)
FALLOCATE(posix_fallocate64)
