"""What there is of this process's children, of their mounts, and of files in its temporary folder, at a moment."""

import ctypes
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from slimrl.agent.sandbox.inside.confine import RUN_USERS
from slimrl.agent.sandbox.user_namespace import FIRST_RUN_USER_ON_HOST

_SET_CHILD_SUBREAPER = 36
SHARED = (Path("/tmp"), Path("/dev/shm"))
"""Folders of the whole machine, of which the files count that belong to a sandbox's user"""
SETTLE_S = 10.0
"""Processes that were killed may take so long to go."""


def adopt_orphans() -> None:
    """From now on a process whose parents have ended is a child of this one."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """This process's, without zombies: whoever adopts an orphan has one when that ends."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def cpu_s() -> float:
    """CPU time so far of this process and of its descendants, those included that have ended."""
    used = 0.0
    for process in (psutil.Process(), *descendants()):
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:4])
    return used


def present() -> set[str]:
    """All that is there, each thing as a line."""
    processes = descendants()
    found = {f"process {process.pid} {process.name()}" for process in processes}
    for pid in (os.getpid(), *(process.pid for process in processes)):
        try:
            mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found |= {f"mount {line.split()[1]} of {pid}" for line in mounts if pid != os.getpid() or "slimrl" in line}
    for path in Path(tempfile.gettempdir()).rglob("*"):
        if (info := _info(path)) is not None:
            found.add(f"file {path} {info.st_size} {info.st_mtime_ns if stat.S_ISREG(info.st_mode) else ''}")
    users = range(FIRST_RUN_USER_ON_HOST, FIRST_RUN_USER_ON_HOST + len(RUN_USERS))
    for path in (path for folder in SHARED for path in folder.iterdir()):
        if (info := _info(path)) is not None and info.st_uid in users:
            found.add(f"file {path}")
    return found


def _info(path: Path) -> os.stat_result | None:
    """None for a file that is gone meanwhile."""
    with suppress(FileNotFoundError):
        return path.lstat()
    return None


def left(before: set[str], look: Callable[[], set[str]] = present) -> list[str]:
    """What is there and was not before, once it has settled, and what is not there any more."""
    deadline = time.monotonic() + SETTLE_S
    while (found := look()) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    return sorted([*(found - before), *(f"no {line}" for line in before - found)])
