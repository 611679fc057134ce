"""Files in /dev/shm that belong to a session of processes and that others write, who do not keep them locked.

Their name has the session's leader and its namespace of process ids: a process can tell that a leader is gone only of
its own namespace, and containers that share /dev/shm may have several. Files of other namespaces are left alone, and so
are those of a leader outside the namespace (a container entered from its host), which the kernel shows as process 0.
"""

import os
import re
from pathlib import Path

import psutil

from slimrl.models.shared_segment import SHARED_MEMORY_DIR

_NAME = re.compile(r"slimrl-\w+@(\d+)-(\d+)-0")


def session_file(name: str) -> Path:
    """Path of this session's file, which may not exist yet."""
    return SHARED_MEMORY_DIR / f"slimrl-{name}@{_namespace()}-{os.getsid(0)}-0"


def remove_if_left(path: Path) -> bool:
    """Remove a file of a session whose leader is known to be gone; whether it is one."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[1]) != _namespace() or _is_alive(int(match[2])):
        return False
    path.unlink(missing_ok=True)
    return True


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _is_alive(pid: int) -> bool:
    """False for a zombie too, which maps nothing any more; true for 0, a leader of whom nothing can be known."""
    if pid == 0:
        return True
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
