"""Files in /dev/shm that killed runs left behind.

- Shared buffers, which their maker keeps locked (shared_buffer.py).
- Folders in which the processes of an engine or of a trainer meet. Their name has their maker and its pid namespace.
- Files of a session that processes of other packages write and do not lock. Their name has the session's leader and its
  pid namespace. A process can tell that a leader is gone only in its own namespace, and containers that share /dev/shm
  may have several. Files of other namespaces are left alone, and so are those of a leader outside the namespace (a
  container entered from its host), which the kernel shows as process 0.
"""

import os
import re
import shutil
from pathlib import Path

import psutil

from slimrl.base.meeting_folder import pid_namespace
from slimrl.base.processes import lives
from slimrl.resync.ipc.shared_buffer import FILE_NAME, SHARED_MEMORY_DIR, lock

_OWNED = re.compile(r"slimrl-\w+@(\d+)-(\d+)-0")


def clean_stale_segments() -> list[str]:
    """Remove this user's files of processes that no longer live, and return their names; called when a run starts."""
    removed = []
    for path in sorted(SHARED_MEMORY_DIR.glob("slimrl-*")):
        if _is_ours(path) and (_remove_unlocked(path) if FILE_NAME.fullmatch(path.name) else _remove_if_left(path)):
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
        with path.open("rb") as file:
            if not lock(file.fileno()):
                return False
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return True


def session_file(name: str) -> Path:
    """Path of this session's file of that name, which may not exist yet."""
    return SHARED_MEMORY_DIR / f"slimrl-{name}@{pid_namespace()}-{os.getsid(0)}-0"


def _remove_if_left(path: Path) -> bool:
    """Remove what has the number of a session's leader, or of a maker, that is known to be gone; whether it is so."""
    match = _OWNED.fullmatch(path.name)
    if match is None or int(match[1]) != pid_namespace() or _is_alive(int(match[2])):
        return False
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return True


def _is_alive(pid: int) -> bool:
    """False for a zombie too, which maps nothing any more; true for 0, a leader of whom nothing can be known."""
    if pid == 0:
        return True
    try:
        return lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
