"""What the C library does with the memory of tensors that are gone."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Numbers of glibc's malloc.h."""

KEPT_BYTES = 128 * 1024**2
"""Freed memory that a process keeps at most."""

LARGE_BYTES = 32 * 1024**2
"""A tensor of so many bytes is given back as soon as it is gone."""


def keep_freed_memory() -> None:
    """Have the tensors that come take the memory of those that are gone.

    Otherwise the system is given it back and asked for new memory again and again, and clears it each time, which takes
    as long as reading the tensor. Nothing changes where the environment sets glibc's thresholds, or the C library is
    another one.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    # What one thread has freed is of use to the others.
    libc.mallopt(M_ARENA_MAX, 1)
