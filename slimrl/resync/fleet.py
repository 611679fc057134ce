"""The engines of one sender during a resync: who still takes part, and who was taken out, and why."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from slimrl.data.protocols import EngineControl, EngineError
from slimrl.resync.fan_out import EnginesFailed, fan_out

T = TypeVar("T")

PROBE_TIMEOUT_S = 5.0
"""Within which an engine must give a sign of life after a call failed."""

MAX_STRIKES = 2
"""Failed calls of a living engine that take it out."""


class Fleet:
    """
    Args:
        timeout_s: deadline of each call.
    """

    def __init__(self, engines: Sequence[EngineControl], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.engines = list(engines)
        """Those that take part."""
        self.failed: dict[str, str] = {}
        """Those that were taken out, and why."""
        self._strikes: Counter[str] = Counter()

    def each(self, what: str, call: Callable[[EngineControl], T]) -> dict[str, T]:
        """Raises EnginesFailed."""
        return fan_out({engine.name: partial(call, engine) for engine in self.engines}, what, self._timeout_s)

    def each_or_out(self, what: str, call: Callable[[EngineControl], T]) -> dict[str, T]:
        """The answers of those that gave one; the others are out."""
        results: dict[str, T] = {}

        def keep(engine: EngineControl) -> None:
            results[engine.name] = call(engine)

        try:
            self.each(what, keep)
        except EnginesFailed as error:
            self._take_out(error.failures)
        return {name: results[name] for name in (engine.name for engine in self.engines)}

    def judge(self, error: EngineError) -> bool:
        """Find out after a failed call whose fault it was, and take out who is not fit to go on.

        Those that give no sign of life are out. An engine gives none while it loads, so no call may be under way. The
        call counts against those that failed it and live: the first time they get another chance.

        Returns:
            Whether anything follows from it; if not, to try again is of no use.
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
        timeout_s = min(PROBE_TIMEOUT_S, self._timeout_s)
        calls: dict[str, Callable[[], Any]] = {e.name: partial(e.probe, timeout_s) for e in self.engines}
        try:
            fan_out(calls, "probe", timeout_s + 1)
        except EnginesFailed as error:
            return error.failures
        return {}

    def _take_out(self, failures: dict[str, str]) -> None:
        self.failed |= failures
        self.engines = [engine for engine in self.engines if engine.name not in failures]
