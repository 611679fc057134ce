"""Growth of the memory of processes, with shared memory counted once."""

import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from slimrl.base.processes import lives

SHARED_MEMORY_DIR = Path("/dev/shm")
INTERVAL_S = 0.01


class PeakWatch:
    """Samples a size in a thread, every `interval_s` seconds and when its block begins and ends. A context manager."""

    def __init__(self, size: Callable[[], int], interval_s: float) -> None:
        self._size, self._interval_s = size, interval_s
        self.first_bytes = self.peak_bytes = 0
        """The size when the block began, and the largest one since then"""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self.first_bytes = self.peak_bytes = self._size()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ends.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._size())


class MemoryWatch(PeakWatch):
    """Watches the anonymous memory of processes and their files in /dev/shm.

    The files are `slimrl-<anything>-<pid>-<number>`, counted once, for the process that created them.
    """

    def __init__(self, pids: Collection[int]) -> None:
        processes = tuple(pids)
        super().__init__(lambda: sum(memory_bytes(pid, "RssAnon") + shared_bytes(pid) for pid in processes), INTERVAL_S)

    @property
    def extra_bytes(self) -> int:
        """The peak so far above what there was when the block began, all processes together."""
        return self.peak_bytes - self.first_bytes


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
