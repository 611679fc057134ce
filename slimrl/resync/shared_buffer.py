"""The buffers of a resync that other processes of a node map, and those that killed runs left behind."""

import os
import re
from pathlib import Path

import psutil

from slimrl import device
from slimrl.models.shared_buffer import CudaBuffer, FileBuffer, SharedBuffer
from slimrl.models.shared_segment import SHARED_MEMORY_DIR

_NAME = re.compile(r"slimrl-.+-(\d+)-\d+")


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
        match = _NAME.fullmatch(path.name)
        if match and not _is_alive(int(match.group(1))) and _is_ours(path):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


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
