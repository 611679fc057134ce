"""Memory that other processes of a node map: a file in /dev/shm on a CPU, device memory behind CUDA IPC on a GPU.

A file is named `slimrl-<name>-<pid>-<number>` and locked by its maker as long as it is in use, so that a later run
finds what a killed one left behind: the kernel lets go of the locks of a process that ends, in whatever namespace.
"""

import base64
import fcntl
import mmap
import os
import pickle
import re
import secrets
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slimrl.models.shared_segment import CUDA_PREFIX, SHARED_MEMORY_DIR


class SharedBuffer(Protocol):
    tensor: Tensor
    """uint8 [nbytes]"""

    def segment(self) -> str:
        """What `open_shared` needs to map the buffer; what was written to `tensor` before is visible there."""
        ...

    def close(self) -> None: ...


class FileBuffer:
    """Raises OSError: /dev/shm has no room for `nbytes`."""

    def __init__(self, nbytes: int, name: str) -> None:
        safe_name = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:64] or "buffer"
        self._path, descriptor = _create(f"slimrl-{safe_name}-{os.getpid()}")
        self._descriptor: int | None = descriptor
        try:
            # Reserves the memory now; without it a full /dev/shm is a SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(SHARED_MEMORY_DIR)) from error
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    def segment(self) -> str:
        return self._path.name

    def close(self) -> None:
        """Remove the name; the memory is freed once nobody maps it."""
        self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class CudaBuffer:
    """Device memory of this process; the engines' processes open it by handle."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(self.tensor)
        self._segment = CUDA_PREFIX + base64.b64encode(pickle.dumps(arguments)).decode()

    def segment(self) -> str:
        # A reader's stream knows nothing of the copies queued here.
        torch.cuda.synchronize(self.tensor.device)
        return self._segment

    def close(self) -> None:
        """The memory goes back when the last reference to `tensor` is gone."""


def _create(stem: str) -> tuple[Path, int]:
    """A locked file under a name that no file has had before, since an engine may still map that one under its name."""
    while True:
        path = SHARED_MEMORY_DIR / f"{stem}-{secrets.randbits(63)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # One that removes what killed runs left may have come before the lock.
        if lock(descriptor) and path.exists():
            return path, descriptor
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take the lock of a file until the descriptor is closed, unless it is taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
