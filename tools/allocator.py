"""Settings of glibc's allocator for freed tensors."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""

KEPT_BYTES = 128 * 1024**2
"""Most freed memory that a process keeps."""

LARGE_BYTES = 32 * 1024**2
"""The memory of a larger tensor is returned to the system at once."""


def keep_freed_memory() -> None:
    """Let new tensors reuse the memory of freed ones.

    Otherwise glibc returns it to the system and asks for new memory, which the system clears each time; that takes as
    long as reading the tensor. Does nothing if the environment sets glibc's thresholds, or with another C library.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    # Threads share what one has freed.
    libc.mallopt(M_ARENA_MAX, 1)
