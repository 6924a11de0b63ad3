// SPDX-License-Identifier: Apache-2.0
// Preloaded: below $DISK a process can write $DISK_BYTES bytes, then the disk is full; with $DISK_READ_ONLY none at all.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_llong written;

static int below(const char *path) {
    const char *disk = getenv("DISK");
    return disk && !strncmp(path, disk, strlen(disk));
}

static int refused(const char *path) {
    if (!getenv("DISK_READ_ONLY") || !below(path)) return 0;
    errno = EROFS;
    return 1;
}

static int full(int fd, size_t count) {
    char link[64], path[4096];
    const char *bytes = getenv("DISK_BYTES");
    if (!bytes) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!below(path)) return 0;
    if (atomic_fetch_add(&written, (long long)count) + (long long)count <= atoll(bytes)) return 0;
    errno = ENOSPC;
    return 1;
}

static size_t length_of(const struct iovec *parts, int number) {
    size_t total = 0;
    for (int i = 0; i < number; i++) total += parts[i].iov_len;
    return total;
}

ssize_t write(int fd, const void *data, size_t count) {
    return full(fd, count) ? -1 : REAL(write)(fd, data, count);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    return full(fd, count) ? -1 : REAL(pwrite)(fd, data, count, at);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    return full(fd, count) ? -1 : REAL(pwrite64)(fd, data, count, at);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    return full(fd, length_of(parts, number)) ? -1 : REAL(writev)(fd, parts, number);
}

#define OPEN(name, ...)                                                                  \
    va_list rest;                                                                        \
    va_start(rest, flags);                                                               \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;            \
    va_end(rest);                                                                        \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) && refused(path)) return -1;     \
    return REAL(name)(__VA_ARGS__, flags, mode)

int open(const char *path, int flags, ...) { OPEN(open, path); }
int open64(const char *path, int flags, ...) { OPEN(open64, path); }
int openat(int folder, const char *path, int flags, ...) { OPEN(openat, folder, path); }
int openat64(int folder, const char *path, int flags, ...) { OPEN(openat64, folder, path); }

int mkdir(const char *path, mode_t mode) { return refused(path) ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return refused(path) ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return refused(path) ? -1 : REAL(rmdir)(path); }
int rename(const char *from, const char *to) { return refused(to) ? -1 : REAL(rename)(from, to); }
int chmod(const char *path, mode_t mode) { return refused(path) ? -1 : REAL(chmod)(path, mode); }
