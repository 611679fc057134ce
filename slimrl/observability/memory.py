"""How much memory processes take beyond what they had, shared memory counted once."""

import os
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import psutil

SHARED_MEMORY_DIR = Path("/dev/shm")
INTERVAL_S = 0.01


class MemoryWatch:
    """Samples, in a thread, the anonymous memory of processes and the files of theirs in /dev/shm.

    Files are those named `slimrl-<anything>-<pid>-<number>`: what a process shares is counted for the one that made it,
    and once, whoever maps it. A context manager; what was there before the block is the baseline.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = tuple(pids)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self._baseline = self._peak = 0

    @property
    def extra_bytes(self) -> int:
        """The peak above the baseline so far, of all the processes together."""
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
        return sum(anonymous_bytes(pid) + shared_bytes(pid) for pid in self._pids)


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that no file backs; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def shared_bytes(pid: int) -> int:
    """Memory behind the files that a process of slimrl has in /dev/shm."""
    total = 0
    for path in SHARED_MEMORY_DIR.glob(f"slimrl-*-{pid}-*"):
        try:
            total += 512 * path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total


def session_members(leader: int) -> list[int]:
    """Living processes of the session that a process leads: all of an engine's, for its server's main process."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found
