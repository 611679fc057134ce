"""Calls to the engines of one sender during a resync: all at the same time, with one deadline; and the send of one
bucket in a thread of its own."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slimrl.base.spans import SPANS
from slimrl.data.engine import EngineError
from slimrl.data.model_weights import EngineControl

PROBE_TIMEOUT_S = 5.0
"""Deadline of an engine's sign of life after a failed call."""

MAX_STRIKES = 2
"""Number of failed calls of a living engine that take it out."""


class EnginesFailed(EngineError):
    """Some engines failed a call; `failures` has the causes by engine."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        """
        Args:
            failures: by the engine's name, a text that names the engine, the call and the cause.
        """
        super().__init__("; ".join(failures.values()))
        self.failures = dict(failures)


def fan_out[T](calls: Mapping[str, Callable[[], T]], what: str, timeout_s: float) -> dict[str, T]:
    """Run all calls, each in a thread of its own, and return their results by name, in the order of `calls`.

    Args:
        what: names the call in errors.

    Raises:
        EnginesFailed: calls raised EngineError or did not return in time. Threads of late calls are daemons.
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
    while len(results) + len(failures) < len(calls):
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


class EngineCalls:
    """
    Args:
        timeout_s: deadline of each call.
    """

    def __init__(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.engines = list(engines)
        """Engines that take part."""
        self.failed: dict[str, str] = {}
        """Causes of the engines that were taken out, by name."""
        self._strikes: Counter[str] = Counter()

    def each[T](self, what: str, call: Callable[[EngineControl], T]) -> dict[str, T]:
        """Call all engines and return their answers by name. Raises EnginesFailed."""
        return fan_out({engine.name: partial(call, engine) for engine in self.engines}, what, self.timeout_s)

    def each_or_out[T](self, what: str, call: Callable[[EngineControl], T]) -> dict[str, T]:
        """Answers by engine. Engines that fail are taken out."""
        results: dict[str, T] = {}

        def keep(engine: EngineControl) -> None:
            results[engine.name] = call(engine)

        try:
            self.each(what, keep)
        except EnginesFailed as error:
            self._take_out(error.failures)
        return {name: results[name] for name in (engine.name for engine in self.engines)}

    def judge(self, error: EngineError) -> bool:
        """After a failed call, take out the engines that cannot continue.

        Engines that give no sign of life are taken out. An engine gives none while it loads, so no call may be under
        way. A living engine that failed the call gets another chance the first time.

        Returns:
            Whether any engine is known to be at fault; if not, a retry is of no use.
        """
        failures = error.failures if isinstance(error, EnginesFailed) else {}
        self._strikes.update(failures.keys())
        silent = self._silent()
        out = {name: reason for name, reason in failures.items() if self._strikes[name] >= MAX_STRIKES}
        out |= {
            name: f"{failures[name]}; {reason}" if name in failures else f"{reason}; {error}"
            for name, reason in silent.items()
        }
        self._take_out(out)
        return bool(failures or silent)

    def _silent(self) -> dict[str, str]:
        timeout_s = min(PROBE_TIMEOUT_S, self.timeout_s)
        calls: dict[str, Callable[[], Any]] = {e.name: partial(e.probe, timeout_s) for e in self.engines}
        try:
            fan_out(calls, "probe", timeout_s + 1)
        except EnginesFailed as error:
            return error.failures
        return {}

    def _take_out(self, failures: dict[str, str]) -> None:
        self.failed |= failures
        self.engines = [engine for engine in self.engines if engine.name not in failures]


class SendThread:
    """
    Args:
        send: must return or raise within its own deadline.
        after: one that must end first; if it fails, this one does not begin and has its error.
    """

    def __init__(self, send: Callable[[], object], after: "SendThread | None" = None) -> None:
        self._send, self._after = send, after
        self._error: Exception | None = None
        # No daemon, as in PeerGroup.drop.
        self._thread = threading.Thread(target=self._run, name="resync-send")
        self._thread.start()

    def wait(self, timeout_s: float) -> Exception | None:
        """The send's error, or None; an EngineError if it has not ended in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return EngineError(f"it was not sent within {timeout_s:g} s")
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
