"""What rewards need while they are used: connections or processes, started before the first rollout and closed at the
end.

A reward that is a class may have `async start()` and `async close()`. Both run on the event loop of the rollouts. What
a start returns, if it is a text, is shown to the user.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from slimrl.rewards.deadline import within
from slimrl.rewards.parts import Part

log = logging.getLogger(__name__)


class NotStarted(Exception):
    """A reward could not be started; the message names it and the cause."""


class RewardServices:
    """The rewards that are started and closed."""

    def __init__(
        self, parts: Sequence[Part], *, timeout_s: float = 120.0, say: Callable[[str], None] = log.info
    ) -> None:
        """
        Args:
            timeout_s: deadline of each start and of each close.
            say: shows the user a line.
        """
        self._parts, self._timeout_s, self._say = list(parts), timeout_s, say
        self._open: list[Part] = []

    async def start(self) -> None:
        """Start the rewards in order; if one fails, it and those before it are closed.

        Raises:
            NotStarted: a reward raised or missed the deadline.
        """
        for part in self._parts:
            self._open.append(part)
            try:
                said = await self._call(part, "start")
            except Exception as error:
                # A task's own code may raise anything.
                await self.close()
                raise NotStarted(f"{part.title}: start failed: {_cause(error)}") from error
            if isinstance(said, str):
                self._say(f"{part.title}: {said}")

    async def close(self) -> None:
        """Close those that were started, the last one first. What fails is logged: the run's result stands."""
        while self._open:
            part = self._open.pop()
            try:
                await self._call(part, "close")
            except Exception as error:  # noqa: BLE001 - a task's own code may raise anything
                log.warning("%s: close failed: %s", part.title, _cause(error))

    async def _call(self, part: Part, name: str) -> Any:
        method = getattr(part.function, name, None)
        if inspect.iscoroutinefunction(method):
            return await within(method(), self._timeout_s, "not done")
        return None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
