"""Ranks that are threads of the test's process."""

import threading
from typing import Any

TIMEOUT_S = 20


class Meeting:
    """Where so many ranks tell each other values; the tests' stand-ins for process groups are made of it."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._values = size, threading.Barrier(size), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, by rank; all ranks call it."""
        self._values[rank] = value
        self.wait()
        values = list(self._values)
        self.wait()
        return values

    def wait(self) -> None:
        """Returns when all ranks have come this far."""
        self._barrier.wait(TIMEOUT_S)
