"""Memory of all processes that this one has started, those that they started included."""

import threading
from contextlib import suppress
from types import TracebackType

import psutil

INTERVAL_S = 2.0
"""Seconds between two looks, each of which reads the page tables of all processes"""


class ChildrenMemory:
    """Samples the sum of their proportional set sizes (smaps_rollup, proc(5)) in a thread, so that a page which several
    processes share counts once. A context manager."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Largest sum so far"""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="children-memory", daemon=True)

    def __enter__(self) -> "ChildrenMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, children_bytes())


def children_bytes() -> int:
    """The sum now."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # It has ended, or belongs to another user.
            total += process.memory_full_info().pss
    return total
