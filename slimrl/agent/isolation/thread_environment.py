"""An environment in a thread of its own, for what is bound to the thread that made it; its copies are in it too."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.isolation.instances import Instances
from slimrl.base.threads import OwnThread
from slimrl.data.prompt import Prompt


class ThreadEnvironment:
    """
    Args:
        make: makes the environment, whose methods may be plain or asynchronous; called in the thread.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._instances, self._thread, self._number = Instances(make), OwnThread(), 0

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        return await self._thread.run(partial(self._instances.start, prompt, seed=seed, scratch=scratch))

    async def step(self, turn: Turn) -> Observation:
        return await self._thread.run(partial(self._instances.step, self._number, turn))

    async def copy(self, *, scratch: dict[str, Any]) -> Self | None:
        made = self._thread.run(partial(self._instances.copy, self._number, scratch=scratch))
        try:
            number = await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(self._close_late)
            raise
        return None if number is None else self._other(number)

    async def close(self) -> None:
        was_last = True
        try:
            was_last = await self._thread.run(partial(self._instances.close, self._number))
        finally:
            if was_last:
                self._thread.end()

    def _close_late(self, made: "asyncio.Future[int | None]") -> None:
        """Close a copy that nobody waits for any more."""
        if not made.cancelled() and made.exception() is None and (number := made.result()) is not None:
            closing = asyncio.ensure_future(self._other(number).close())
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _other(self, number: int) -> Self:
        other = type(self).__new__(type(self))
        other._instances, other._thread, other._number = self._instances, self._thread, number
        return other
