"""One call to every engine at the same time, with one deadline and the first error at once."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slimrl.data.protocols import EngineError

T = TypeVar("T")


def fan_out(calls: Mapping[str, Callable[[], T]], what: str, timeout_s: float) -> dict[str, T]:
    """Run all calls, each in a thread of its own, and return their results by name, in the order of `calls`.

    Args:
        what: names the call in errors.

    Raises:
        EngineError: the first call that raised EngineError, without waiting for the others; or, naming them, calls
            that did not return in time. Their threads are daemons and end with the process at the latest.
        Exception: anything else that a call raised.
    """
    answers: queue.SimpleQueue[tuple[str, Any, Exception | None]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], T]) -> None:
        try:
            answers.put((name, call(), None))
        except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
            answers.put((name, None, error))

    for name, call in calls.items():
        threading.Thread(target=run, args=(name, call), name=f"{what}-{name}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    results: dict[str, T] = {}
    while len(results) < len(calls):
        try:
            name, result, error = answers.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            late = ", ".join(name for name in calls if name not in results)
            raise EngineError(f"{late}: {what} did not finish within {timeout_s:.0f} s") from None
        if error is not None:
            raise error
        results[name] = result
    return {name: results[name] for name in calls}
