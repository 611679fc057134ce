"""Growth of the memory of processes, with shared memory counted once."""

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from slimrl.base.processes import lives

SHARED_MEMORY_DIR = Path("/dev/shm")
INTERVAL_S = 0.01


class MemoryWatch:
    """Samples the anonymous memory of processes and their files in /dev/shm, in a thread.

    The files are `slimrl-<anything>-<pid>-<number>`, counted once, for the process that created them.
    A context manager; the baseline is the memory when the block begins.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = tuple(pids)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._baseline = self._peak = 0

    @property
    def extra_bytes(self) -> int:
        """The peak above the baseline so far, all processes together."""
        return self._peak - self._baseline

    def __enter__(self) -> "MemoryWatch":
        self._baseline = self._peak = self._now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._peak = max(self._peak, self._now())

    def _watch(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        return sum(memory_bytes(pid, "RssAnon") + shared_bytes(pid) for pid in self._pids)


def memory_bytes(pid: int, field: str) -> int:
    """A size field of /proc/<pid>/status (proc_pid_status(5)); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def shared_bytes(pid: int) -> int:
    """Memory of the files that a process of slimrl has created in /dev/shm."""
    total = 0
    for path in SHARED_MEMORY_DIR.glob(f"slimrl-*-{pid}-*"):
        with suppress(FileNotFoundError):
            total += 512 * path.stat().st_blocks
    return total


def session_members(leader: int) -> list[int]:
    """Living processes of a session, such as all processes of an engine, by the pid of its leader."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and lives(process):
                found.append(process.pid)
    return found
