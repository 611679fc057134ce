"""The send of one bucket, under way in a thread of its own."""

import threading
from collections.abc import Callable

from slimrl.data.protocols import EngineError


class Sending:
    """
    Args:
        send: must return or raise within its own deadline.
    """

    def __init__(self, send: Callable[[], object]) -> None:
        self._send = send
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="resync-send", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> Exception | None:
        """What the send raised; the thread has ended, or is late."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return EngineError(f"a bucket was not sent within {timeout_s:g} s")
        return self._error

    def _run(self) -> None:
        try:
            self._send()
        except Exception as error:  # noqa: BLE001 - handed to the caller's thread
            self._error = error
