"""How much of the host's memory a sandbox has taken, of whatever kind, measured from outside in two ways.

1. The pages of its processes, each once, and all that is no process's private memory: shared memory, files in memory,
   buffers of sockets and pipes, tables and other objects of the kernel. It may miss what is there for a moment.
2. All that the kernel gave away, less what it could take back and the private memory of processes outside the sandbox.
   It misses nothing, but other work on the machine disturbs it, as forks share what is counted twice.
"""

import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S = 0.005
_RECLAIMABLE = ("MemFree", "Buffers", "Cached", "SReclaimable")


class HostMemory:
    """Samples in a thread while it is entered.

    Args:
        pid: of a sandbox, whose descendants count.
        least_free_bytes: of the host; with less, `stop` is called, once, from the thread: a program that is not bounded
            ends no machine.
    """

    def __init__(self, pid: int, least_free_bytes: int, stop: Callable[[], None]) -> None:
        self._pid, self._least_free_bytes, self._stop = pid, least_free_bytes, stop
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = [0, 0]
        samples = [self.now_bytes() for _ in range(5)]
        self._before = [int(statistics.median(some)) for some in zip(*samples, strict=True)]
        self.peaks_bytes = [0, 0]
        """The most that was taken, in both ways."""

    def __enter__(self) -> "HostMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def now_bytes(self) -> list[int]:
        """More than before this was made, in both ways."""
        inside = _with_descendants(self._pid)
        pages = sum(_proportional_bytes(pid) for pid in inside)
        fields = _meminfo()
        taken = fields["MemTotal"] + fields["Shmem"] - sum(fields[name] for name in _RECLAIMABLE)
        others = sum(
            _private_bytes(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in inside
        )
        ways = (taken - fields["AnonPages"] + pages, taken - others)
        return [now - before for now, before in zip(ways, self._before, strict=True)]

    def _watch(self) -> None:
        stopped = False
        while not self._done.wait(SAMPLE_S):
            self.peaks_bytes = [max(pair) for pair in zip(self.peaks_bytes, self.now_bytes(), strict=True)]
            if not stopped and _meminfo()["MemAvailable"] < self._least_free_bytes:
                stopped = True
                self._stop()


def _with_descendants(pid: int) -> set[int]:
    found = {pid}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            found |= _with_descendants(int(child))
    return found


def _proportional_bytes(pid: int) -> int:
    """Private memory, each page divided by the processes that have it. Of a process whose first thread has ended, by
    another."""
    for shown in Path(f"/proc/{pid}/task").glob("*/smaps_rollup"):
        for line in _read(shown).splitlines():
            if line.startswith("Pss_Anon:"):
                return 1024 * int(line.split()[1])
    return 0


def _private_bytes(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return PAGE_BYTES * (int(fields[1]) - int(fields[2])) if fields else 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # it has ended


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
