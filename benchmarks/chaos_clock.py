"""A wall clock that jumps: a library which LD_PRELOAD puts before libc's, and which adds the seconds of a file.

The processes map the file once, so a new offset holds for all of them at once. Other clocks stay as they are. The
kernel's does not jump, so waits until a time of the wall clock, as Ray's are, are given the true one.
"""

import struct
import subprocess
from pathlib import Path

FILE = "SLIMRL_CHAOS_CLOCK"
"""The variable that names the file."""
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("SLIMRL_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) offset = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return code;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec own = *until;
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    // A monotonic clock has not come so far.
    if (offset && own.tv_sec > 1000000000) own.tv_sec -= *offset;
    return real(condition, mutex, &own);
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    int code = clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return code;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """The wall clock of the processes that get `environment`."""

    def __init__(self, folder: Path) -> None:
        source, library, self._file = folder / "clock.c", folder / "clock.so", folder / "clock"
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        self._file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), FILE: str(self._file)}

    def jump(self, seconds: int) -> None:
        """To so many seconds after the true time."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))
