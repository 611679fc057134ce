"""What rewards need while they are used: connections or processes, started before the first rollout and closed at the
end.

A reward that is a class may have `async start()` and `async close()`. Both run on the event loop of the rollouts.
"""

import inspect
import logging
from collections.abc import Sequence

from slimrl.rewards.deadline import within
from slimrl.rewards.parts import Part

log = logging.getLogger(__name__)


class NotStarted(Exception):
    """A reward could not be started; the message names it and the cause."""


class RewardServices:
    """The rewards that are started and closed."""

    def __init__(self, parts: Sequence[Part] = (), *, timeout_s: float = 120.0) -> None:
        """`timeout_s` is the deadline of each start and of each close."""
        self._parts, self._timeout_s = list(parts), timeout_s
        self._open: list[Part] = []

    async def start(self) -> None:
        """Start the rewards in order; if one fails, it and those before it are closed.

        Raises:
            NotStarted: a reward raised or missed the deadline.
        """
        for part in self._parts:
            self._open.append(part)
            try:
                await self._call(part, "start")
            except Exception as error:
                # A task's own code may raise anything.
                await self.close()
                raise NotStarted(f"{part.title}: start failed: {_cause(error)}") from error

    async def close(self) -> None:
        """Close those that were started, the last one first. What fails is logged: the run's result stands."""
        while self._open:
            part = self._open.pop()
            try:
                await self._call(part, "close")
            except Exception as error:  # noqa: BLE001 - a task's own code may raise anything
                log.warning("%s: close failed: %s", part.title, _cause(error))

    async def _call(self, part: Part, name: str) -> None:
        method = getattr(part.function, name, None)
        if inspect.iscoroutinefunction(method):
            await within(method(), self._timeout_s, "not done")


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
