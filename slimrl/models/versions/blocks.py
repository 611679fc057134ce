"""Reading and hashing tensors in files block by block, without holding more than a block."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from slimrl.models.versions.codec import BLOCK_BYTES

MAX_WORKERS = 8
"""Threads that encode, apply or hash; beyond them disks and memory set the pace."""


def num_workers() -> int:
    """As many as this process has cores, at most MAX_WORKERS."""
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


def block_ranges(nbytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Byte ranges of at most BLOCK_BYTES that cover `nbytes` bytes from `start` on."""
    for first in range(start, start + nbytes, BLOCK_BYTES):
        yield first, min(first + BLOCK_BYTES, start + nbytes)


def read_at(descriptor: int, file: Path, out: np.ndarray, offset: int) -> None:
    """Fill `out`, uint8, from a file.

    Raises:
        ValueError: the file ends before.
    """
    view = out.data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{file}: cut short: it ends at byte {offset + done}")
        done += count


def file_hash(descriptor: int, file: Path, start: int, nbytes: int) -> str:
    """XXH3-64, 16 hexadecimal digits, of some of a file's bytes."""
    state = xxhash.xxh3_64()
    buffer = np.empty(min(nbytes, BLOCK_BYTES), dtype=np.uint8)
    for first, stop in block_ranges(nbytes, start):
        block = buffer[: stop - first]
        read_at(descriptor, file, block, first)
        state.update(block.data)
    return state.hexdigest()
