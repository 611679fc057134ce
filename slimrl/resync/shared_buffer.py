"""The buffers of a resync that other processes of a node map, and those that killed runs left behind."""

import os
import re
from pathlib import Path

from slimrl import device
from slimrl.models.session_file import remove_if_left
from slimrl.models.shared_buffer import CudaBuffer, FileBuffer, SharedBuffer, lock
from slimrl.models.shared_segment import SHARED_MEMORY_DIR

_NAME = re.compile(r"slimrl-[A-Za-z0-9_.]+-\d+-\d+")


def shared_buffer(nbytes: int, run_id: str) -> SharedBuffer:
    """The kind that this process's device has.

    Raises:
        OSError: /dev/shm has no room for `nbytes`.
    """
    return CudaBuffer(nbytes, device.compute_device()) if device.device_type() == "cuda" else FileBuffer(nbytes, run_id)


def clean_stale_segments() -> list[str]:
    """Remove this user's files of processes that no longer live, and return their names; called when a run starts."""
    removed = []
    for path in sorted(SHARED_MEMORY_DIR.glob("slimrl-*")):
        if _is_ours(path) and (_remove_unlocked(path) if _NAME.fullmatch(path.name) else remove_if_left(path)):
            removed.append(path.name)
    return removed


def _is_ours(path: Path) -> bool:
    """False for a file of another user, who alone may remove it, and for one that is gone by now."""
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _remove_unlocked(path: Path) -> bool:
    """Remove a buffer's file, unless its maker holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        if not lock(descriptor):
            return False
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True
