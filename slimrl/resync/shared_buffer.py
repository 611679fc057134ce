"""Memory that other processes of a node map: a file in /dev/shm on a CPU, device memory behind CUDA IPC on a GPU.

A file is named `slimrl-<run>-<pid>-<number>`, so that a later run finds what a killed one left behind.
"""

import base64
import mmap
import os
import pickle
import re
from itertools import count
from pathlib import Path
from typing import Protocol

import psutil
import torch
from torch import Tensor

from slimrl import device
from slimrl.models.shared_segment import CUDA_PREFIX, SHARED_MEMORY_DIR

_NAME = re.compile(r"slimrl-.+-(\d+)-\d+")


class SharedBuffer(Protocol):
    tensor: Tensor
    """uint8 [nbytes]"""

    def segment(self) -> str:
        """What `open_shared` needs to map the buffer; what was written to `tensor` before is visible there."""
        ...

    def close(self) -> None: ...


def shared_buffer(nbytes: int, run_id: str) -> SharedBuffer:
    """The kind that this process's device has."""
    return CudaBuffer(nbytes) if device.device_type() == "cuda" else FileBuffer(nbytes, run_id)


class FileBuffer:
    """Raises OSError: /dev/shm has no room for `nbytes`."""

    def __init__(self, nbytes: int, run_id: str) -> None:
        safe_id = re.sub(r"[^A-Za-z0-9_.]+", "_", run_id)[:64] or "run"
        self._path, descriptor = _create(f"slimrl-{safe_id}-{os.getpid()}")
        try:
            # Reserves the memory now; without it a full /dev/shm is a SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
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

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device.compute_device())

    def segment(self) -> str:
        from torch.multiprocessing.reductions import reduce_tensor

        # The engine reads on a stream of its own, which knows nothing of the copies queued here.
        torch.cuda.synchronize()
        _, arguments = reduce_tensor(self.tensor)
        return CUDA_PREFIX + base64.b64encode(pickle.dumps(arguments)).decode()

    def close(self) -> None:
        """The memory goes back when the last reference to `tensor` is gone."""


def clean_stale_segments() -> list[str]:
    """Remove this user's files of processes that no longer live, and return their names; called when a run starts."""
    removed = []
    for path in sorted(SHARED_MEMORY_DIR.glob("slimrl-*")):
        match = _NAME.fullmatch(path.name)
        if match and not _is_alive(int(match.group(1))) and _is_ours(path):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _create(stem: str) -> tuple[Path, int]:
    for number in count():
        path = SHARED_MEMORY_DIR / f"{stem}-{number}"
        try:
            return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
    raise AssertionError("count() does not end")


def _is_ours(path: Path) -> bool:
    """False for a file of another user, who alone may remove it, and for one that is gone by now."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    """False for a zombie too, which maps nothing any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
