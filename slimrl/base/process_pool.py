"""A pool of processes that answer requests (answering_process.py), for many threads.

1. The first requests start the processes. The process that was used last is used first, so that no more run than are
   needed.
2. A process that has ended is replaced when the next request needs it.
3. The time that a request waits for its turn and for a start does not count against its caller's deadline.

A multiprocessing pool would import the driver's main module into each process. Its resource tracker would outlive it,
and the end of a run would wait for the tracker.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, LifoQueue

from slimrl.base.answering_process import AnsweringProcess, ProcessFailed
from slimrl.base.waits import is_over, waiting


class ProcessPool:
    """
    Args:
        start: starts a process.
        work: what the processes do, for messages, such as "compares answers".
        num_processes: the most that there are at a time.
        turn_s: how long a request waits for a process while no other request gets its answer.
    """

    def __init__(self, start: Callable[[], AnsweringProcess], *, work: str, num_processes: int, turn_s: float) -> None:
        self._start_one, self._work, self._turn_s = start, work, turn_s
        self._slots: LifoQueue[AnsweringProcess | None] = LifoQueue()
        for _ in range(num_processes):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._started: set[AnsweringProcess] = set()
        self._closed = False
        self._freed_at = time.monotonic()

    @contextmanager
    def process(self, is_given_up: Callable[[], bool] = is_over) -> Iterator[AnsweringProcess]:
        """A process for the calling thread alone, ready for requests.

        Raises:
            ProcessFailed: none was free or ready in time, the pool was closed, or nobody waits for the answer any more.
            OSError: none can be started.
        """
        with waiting():
            process = self._turn()
        try:
            if is_given_up():
                raise ProcessFailed("nobody waits for this answer any more")
            if process is None or not process.lives:
                with waiting():
                    process = self._started_one()
                    process.wait_ready()
            yield process
        finally:
            self._freed_at = time.monotonic()
            self._slots.put(process)

    @property
    def pids(self) -> list[int]:
        """Pids of the processes that are alive."""
        with self._lock:
            return [process.pid for process in self._started if process.lives]

    def close(self) -> None:
        """End all processes; requests that wait or run raise ProcessFailed."""
        with self._lock:
            self._closed = True
            for process in self._started:
                process.end()

    def _turn(self) -> AnsweringProcess | None:
        """A free process, or the place for one. However many requests wait, none is late while others get theirs."""
        began = time.monotonic()
        while (left_s := max(began, self._freed_at) + self._turn_s - time.monotonic()) > 0:
            with suppress(Empty):
                return self._slots.get(timeout=left_s)
        raise ProcessFailed(f"no process that {self._work} was free within {self._turn_s:g} s")

    def _started_one(self) -> AnsweringProcess:
        with self._lock:
            if self._closed:
                raise ProcessFailed("the run is ending")
            self._started = {process for process in self._started if process.lives}
            process = self._start_one()
            self._started.add(process)
            return process
