"""How much of the host's memory is taken, of whatever kind: what the kernel gave away less what it could take back.

The private memory of processes outside the sandbox is subtracted, so that other work on the machine counts little.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_S = 0.005
OTHERS_S = 0.1
_RECLAIMABLE = ("MemFree", "Buffers", "Cached", "SReclaimable")


class HostMemory:
    """Samples in a thread while it is entered. `peak_bytes` is the most that was taken since then.

    Args:
        pid: of a sandbox, whose descendants count.
        most_bytes: beyond it `stop` is called, once, from the thread: a program that is not bounded ends no machine.
        least_free_bytes: of the host; likewise.
    """

    def __init__(self, pid: int, most_bytes: int, least_free_bytes: int, stop: Callable[[], None]) -> None:
        self._pid, self._most_bytes, self._least_free_bytes, self._stop = pid, most_bytes, least_free_bytes, stop
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._others = 0
        self._before = self._taken(0.0)
        self.peak_bytes = 0

    def __enter__(self) -> "HostMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def now_bytes(self) -> int:
        return self._taken(0.0) - self._before

    def _watch(self) -> None:
        stopped, looked = False, 0.0
        while not self._done.wait(SAMPLE_S):
            taken = self._taken(looked) - self._before
            if taken > self.peak_bytes or time.monotonic() - looked > OTHERS_S:
                taken, looked = self._taken(0.0) - self._before, time.monotonic()
            self.peak_bytes = max(self.peak_bytes, taken)
            if not stopped and (taken > self._most_bytes or _meminfo()["MemAvailable"] < self._least_free_bytes):
                stopped = True
                self._stop()

    def _taken(self, looked: float) -> int:
        if time.monotonic() - looked > OTHERS_S:
            self._others = self._of_others()
        fields = _meminfo()
        return fields["MemTotal"] + fields["Shmem"] - sum(fields[name] for name in _RECLAIMABLE) - self._others

    def _of_others(self) -> int:
        parents, private = {}, {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                _, resident, shared, *_ = (folder / "statm").read_text().split()
            except OSError:
                continue  # it has ended
            private[int(folder.name)] = PAGE_BYTES * (int(resident) - int(shared))
        inside = {self._pid}
        while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
            inside |= more
        return sum(size for pid, size in private.items() if pid not in inside)


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
