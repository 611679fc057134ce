"""Memory that other processes of a node map: a file in /dev/shm on a CPU, device memory behind CUDA IPC on a GPU.

The trainer's ranks write into their node's buffer through it, and the engines' processes load from it.
A file is named `slimrl-<name>-<pid>-<number>`. Its maker locks it while it is in use. The kernel releases the locks of
a process that ends, in whatever namespace, so a later run can tell which files a killed run left behind.

Whoever opens a buffer has its `segment` from a message. It is read as plain values, and names a file of this user in
/dev/shm and no other, so a message from a stranger runs no code and maps nothing of another kind.
"""

import base64
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

SHARED_MEMORY_DIR = Path("/dev/shm")

FILE_NAME = re.compile(r"slimrl-[A-Za-z0-9_.]{1,64}-\d+-\d+")

CUDA_PREFIX = "cuda-ipc:"
"""Prefix of a CUDA segment. A JSON object follows: the arguments of UntypedStorage._new_shared_cuda after its
device."""
_HANDLE: dict[str, Any] = {
    "handle": bytes,
    "size_bytes": int,
    "offset_bytes": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}
"""Names and types of those arguments in their order; bytes are written as base64."""


class SharedBuffer(Protocol):
    tensor: Tensor
    """uint8 [nbytes], the buffer"""

    def segment(self) -> str:
        """The argument of `open_shared`; earlier writes to `tensor` are visible there."""
        ...

    def close(self) -> None: ...


class FileBuffer:
    """Raises OSError: /dev/shm has no room for `nbytes`."""

    def __init__(self, nbytes: int, name: str) -> None:
        safe_name = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:64] or "buffer"
        self._path, descriptor = _create(f"slimrl-{safe_name}-{os.getpid()}")
        self._descriptor: int | None = descriptor
        try:
            # Reserves the memory now; otherwise a full /dev/shm is a SIGBUS in the middle of a write.
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(SHARED_MEMORY_DIR)) from error
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    def segment(self) -> str:
        return self._path.name

    def close(self) -> None:
        """Unlink the file; the kernel frees the memory when no process maps it."""
        self._path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class CudaBuffer:
    """Device memory of this process, which other processes open by a CUDA IPC handle.

    Raises OSError: the device has no room for `nbytes`.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, str(error), str(device)) from error
        # As torch.multiprocessing.reductions does it, whose functions SGLang replaces by others.
        _, *handle, _ = self.tensor.untyped_storage()._share_cuda_()
        # No event to wait for: it cannot be opened where its GPU is not visible. `segment` makes it unnecessary.
        self._segment = CUDA_PREFIX + _encode_handle((*handle, False))

    def segment(self) -> str:
        # A reader's stream does not wait for what is queued here.
        torch.cuda.current_stream(self.tensor.device).synchronize()
        return self._segment

    def close(self) -> None:
        """Do nothing: the last reference to `tensor` frees the memory."""


def shared_buffer(nbytes: int, name: str, device: torch.device) -> SharedBuffer:
    """A CudaBuffer or a FileBuffer, as the device says.

    Args:
        name: part of a file's name.

    Raises:
        OSError: the device, or /dev/shm, has no room for `nbytes`.
    """
    return CudaBuffer(nbytes, device) if device.type == "cuda" else FileBuffer(nbytes, name)


def open_shared(segment: str, *, writable: bool = False) -> Tensor:
    """uint8, the whole buffer of another process by its `segment`; it stays mapped as long as the tensor lives.

    Without `writable`, a write to a file's mapping is an access violation.

    Raises:
        OSError: there is no such file.
        ValueError: the segment names no buffer of this user, or a GPU's memory where there is no GPU.
    """
    if segment.startswith(CUDA_PREFIX):
        if not torch.cuda.is_available():
            raise ValueError("a segment of a GPU's memory, and this process has no GPU")
        # The number of the GPU is the maker's, which may see others, or others first. Memory opens on any of the node.
        handle = _decode_handle(segment.removeprefix(CUDA_PREFIX))
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    with os.fdopen(_open_own(segment, writable=writable), "r+b" if writable else "rb") as file:
        # Fills page tables now: page faults for every 4 KiB of a first read cost more than the copy.
        mapping = mmap.mmap(
            file.fileno(),
            0,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _open_own(name: str, *, writable: bool) -> int:
    """A descriptor of this user's file of that name in /dev/shm; raises OSError or ValueError."""
    if FILE_NAME.fullmatch(name) is None:
        raise ValueError(f"not the name of a shared buffer: {name[:100]!r}")
    descriptor = os.open(SHARED_MEMORY_DIR / name, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise ValueError(f"not a shared buffer of this user: {name}")
    return descriptor


def _encode_handle(handle: tuple[Any, ...]) -> str:
    plain = {
        name: base64.b64encode(value).decode() if kind is bytes else value
        for (name, kind), value in zip(_HANDLE.items(), handle, strict=True)
    }
    return json.dumps(plain)


def _decode_handle(text: str) -> list[Any]:
    """The inverse of `_encode_handle`; raises ValueError for anything else."""
    plain = json.loads(text)
    if not isinstance(plain, dict) or plain.keys() != _HANDLE.keys():
        raise ValueError("not a handle of a GPU's memory")
    handle = []
    for name, kind in _HANDLE.items():
        value: Any = plain[name]
        if kind is bytes and isinstance(value, str):
            value = base64.b64decode(value, validate=True)
        if type(value) is not kind or (kind is int and value < 0):
            raise ValueError(f"not a handle of a GPU's memory: {name}")
        handle.append(value)
    return handle


def _create(stem: str) -> tuple[Path, int]:
    """A locked file under a fresh name: an engine may still map an earlier file by its name."""
    while True:
        path = SHARED_MEMORY_DIR / f"{stem}-{secrets.randbits(63)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Another process that removes stale files may have removed it before the lock.
        if lock(descriptor) and path.exists():
            return path, descriptor
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock a file until the descriptor is closed; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
