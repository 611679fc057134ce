"""Memory that other processes of a node map: a file in /dev/shm on a CPU, device memory behind CUDA IPC on a GPU.

A file is named `slimrl-<name>-<pid>-<number>`, so that a later run finds what a killed one left behind.
"""

import base64
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
        try:
            # Reserves the memory now; without it a full /dev/shm is a SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    def segment(self) -> str:
        return self._path.name

    def close(self) -> None:
        """Remove the name; the memory is freed once nobody maps it."""
        self._path.unlink(missing_ok=True)


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
    """A file under a name that no file has had before it, since an engine may still map that one under its name."""
    path = SHARED_MEMORY_DIR / f"{stem}-{secrets.randbits(63)}"
    return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
