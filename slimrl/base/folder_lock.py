"""A lock on a folder that one process writes: held while its file is open, and released by the kernel.

flock(2) works across nodes on NFS and on Lustre mounted with `flock`. Child processes, which may outlive this one, do
not hold the lock: Python opens the file close-on-exec, and a forked child closes it. The file names the last holder and
is never removed; its existence does not mean that the lock is held.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

LOCK_FILE = "lock"
POLL_S = 0.5

_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_held: set[int] = set()
"""Descriptors of the locked files."""

log = logging.getLogger(__name__)


def _close_held() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)


@contextmanager
def folder_lock(folder: Path, *, wait_s: float = 0.0, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Hold the lock of an existing folder; it may be renamed meanwhile.

    Args:
        wait_s: how long to wait for another holder.
        say: gets a message about the holder waited for, and one if the file system has no locks and keeps nobody out.

    Raises:
        ValueError: another process, which the message names, holds it; or the folder cannot be written.
    """
    path, deadline = folder / LOCK_FILE, time.monotonic() + wait_s
    waits_for = ""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"{path} cannot be opened: {error.strerror}") from error
        with os.fdopen(descriptor, "r+"):
            holder = _lock(descriptor, path, say)
            if holder is None:
                _held.add(descriptor)
                try:
                    yield
                finally:
                    _held.discard(descriptor)
                return
        if time.monotonic() >= deadline:
            raise ValueError(
                f"{folder} is in use by {holder}. End that process first. If its node is gone for good and the lock "
                f"is still held, remove {path}."
            )
        if holder != waits_for:
            waits_for = holder
            say(f"{folder} is in use by {holder}; waiting for it to end")
        time.sleep(POLL_S)


def holder_of(folder: Path) -> str | None:
    """The process that holds the folder's lock, as its file names it; None if none does, or if no lock can be read."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named_in(descriptor)
        except OSError:
            return None
    return None


def _named_in(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"


def _lock(descriptor: int, path: Path, say: Callable[[str], None]) -> str | None:
    """Try to take the lock; returns the other holder, None on success."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named_in(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        say(f"{path.parent}: its file system has no locks ({error.strerror}). Do not start a second process there")
        return None
    if not path.is_file() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        return "a process that has just replaced it"
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return None
