"""Waits of a call for its turn with something that all calls share: a process, a place in the sandbox.

They do not count against the call's own deadline, since other calls would make it late. Each has a deadline of its own.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LOOK_S = 0.05
"""Seconds between two looks at a call that still waits when its time is up."""


class Waits:
    """How long a call has waited, in all of its threads; several at the same time count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number, self._since, self._seconds = 0, 0.0, 0.0
        self.over = False
        """Whether nobody waits for the call any more; its threads go on all the same"""

    def change(self, number: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._number:
                self._seconds += now - self._since
            self._number, self._since = self._number + number, now

    def left_s(self, ends_at: float) -> float:
        """Seconds until the call is late, as it looks now; LOOK_S or more while it waits."""
        with self._lock:
            now = time.monotonic()
            if self._number:
                return max(LOOK_S, ends_at + self._seconds - self._since)
            return ends_at + self._seconds - now


_WAITS: ContextVar[Waits | None] = ContextVar("waits", default=None)
"""The waits of the call that this context belongs to; `in_thread` passes them on."""


@contextmanager
def waiting() -> Iterator[None]:
    """The time in this block does not count against the deadline of the call that it belongs to, if it has one."""
    waits = _WAITS.get()
    if waits is None:
        yield
        return
    waits.change(1)
    try:
        yield
    finally:
        waits.change(-1)


def is_over() -> bool:
    """Whether nobody waits for the call that this context belongs to, which then need not take its turn."""
    waits = _WAITS.get()
    return waits is not None and waits.over


@contextmanager
def noting_waits() -> Iterator[Waits]:
    """What is begun in this block, in tasks and by `in_thread`, notes its waits here."""
    waits = Waits()
    outer = _WAITS.set(waits)
    try:
        yield waits
    finally:
        _WAITS.reset(outer)
