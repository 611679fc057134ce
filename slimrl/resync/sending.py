"""The send of one bucket in a thread of its own, and the clock of such sends."""

import threading
import time
from collections.abc import Callable

from slimrl.base.spans import SPANS
from slimrl.data.engine import EngineError
from slimrl.resync.report import Clock


class SendThread:
    """
    Args:
        send: must return or raise within its own deadline.
        after: one that must end first; if it fails, this one does not begin and has its error.
    """

    def __init__(self, send: Callable[[], object], after: "SendThread | None" = None) -> None:
        self._send, self._after = send, after
        self._error: Exception | None = None
        # No daemon, as in BroadcastGroup.drop.
        self._thread = threading.Thread(target=self._run, name="resync-send")
        self._thread.start()

    def wait(self, timeout_s: float) -> Exception | None:
        """The send's error, or None; an EngineError if it has not ended in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return EngineError(f"a bucket was not sent within {timeout_s:g} s")
        return self._error

    def _run(self) -> None:
        if self._after is not None:
            self._after._thread.join()
            if self._after._error is not None:
                self._error = self._after._error
                return
            self._after = None
        try:
            with SPANS("send"):
                self._send()
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread
            self._error = error


class SendClock:
    """Adds the seconds in which at least one send was running to the stage `send`. For sends that end in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._until = 0.0

    def run(self, send: Callable[[], object]) -> None:
        start = time.perf_counter()
        try:
            send()
        finally:
            with self._lock:
                end = time.perf_counter()
                self._clock.seconds["send"] += end - max(start, self._until)
                self._until = end
