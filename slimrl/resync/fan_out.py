"""One call to every engine at the same time, with one deadline."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slimrl.data.protocols import EngineError

T = TypeVar("T")


class EnginesFailed(EngineError):
    """Some engines failed a call."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        """
        Args:
            failures: what each said or did, by the engine's name; the text names the engine and the call.
        """
        super().__init__("; ".join(failures.values()))
        self.failures = dict(failures)


def fan_out(
    calls: Mapping[str, Callable[[], T]], what: str, timeout_s: float, *, at_once: bool = False
) -> dict[str, T]:
    """Run all calls, each in a thread of its own, and return their results by name, in the order of `calls`.

    Args:
        what: names the call in errors.
        at_once: raise the first failure without waiting for the other calls.

    Raises:
        EnginesFailed: calls that raised EngineError, or did not return in time. Threads of the latter are daemons and
            end with the process at the latest.
        Exception: anything else that a call raised, at once.
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
    failures: dict[str, str] = {}
    while len(results) + len(failures) < len(calls) and not (at_once and failures):
        try:
            name, result, error = answers.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            late = [name for name in calls if name not in results and name not in failures]
            failures |= {name: f"{name}: {what} did not finish within {timeout_s:g} s" for name in late}
            continue
        if isinstance(error, EngineError):
            failures[name] = str(error)
        elif error is not None:
            raise error
        else:
            results[name] = result
    if failures:
        raise EnginesFailed(failures)
    return {name: results[name] for name in calls}
