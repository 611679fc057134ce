"""Memory of another process on the same node: a file in /dev/shm on a CPU, device memory behind a CUDA IPC handle.

The trainer's ranks write into their node's buffer through it, and the engines' processes load from it.
"""

import base64
import mmap
import os
import pickle
import warnings
from pathlib import Path

import torch
from torch import Tensor

SHARED_MEMORY_DIR = Path("/dev/shm")

CUDA_PREFIX = "cuda-ipc:"
"""Before the base64 of the pickled arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor."""


def open_shared(segment: str, *, writable: bool = False) -> Tensor:
    """uint8, the whole buffer that another process gave this name; it stays mapped as long as the tensor lives.

    Without `writable`, writing to a file's mapping is an access violation.

    Raises:
        OSError: there is no such file.
    """
    if segment.startswith(CUDA_PREFIX):
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = pickle.loads(base64.b64decode(segment.removeprefix(CUDA_PREFIX)))
        return rebuild_cuda_tensor(*arguments)
    descriptor = os.open(SHARED_MEMORY_DIR / segment, os.O_RDWR if writable else os.O_RDONLY)
    try:
        # Page tables are filled now: a fault for every 4 KiB of a first read costs more than the copy.
        mapping = mmap.mmap(
            descriptor,
            os.fstat(descriptor).st_size,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        )
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)
