"""Host memory for copies of device memory, page-locked where there is a GPU, in exactly as many pages as it needs.

torch rounds its own pinned memory up to a power of two: for a rank's weights and optimizer, up to twice their size.
"""

import mmap
import weakref
from typing import Any

import torch


class HostMemory:
    """A buffer in host memory. Its `tensor` must not outlive it.

    Raises:
        MemoryError: the host has not enough memory that can be locked.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        if not pinned:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
            return
        mapping = mmap.mmap(-1, whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
        """uint8 [nbytes], the buffer"""
        address, runtime = self.tensor.data_ptr(), torch.cuda.cudart()
        if status := int(runtime.cudaHostRegister(address, len(mapping), 0)):
            raise MemoryError(f"cannot lock {len(mapping)} bytes of host memory: CUDA error {status}")
        weakref.finalize(self, _unlock, runtime, address).atexit = False


def whole_pages(nbytes: int) -> int:
    """Bytes of the fewest pages that hold so many."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _unlock(runtime: Any, address: int) -> None:
    """Release the page lock, before the memory is unmapped."""
    runtime.cudaHostUnregister(address)
