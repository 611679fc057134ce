"""An environment in a thread of its own, for what is bound to the thread that made it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from slimrl.agent.environment import Observation, Turn
from slimrl.agent.isolation.instance import Instance
from slimrl.base.threads import OwnThread
from slimrl.data.prompt import Prompt


class ThreadEnvironment:
    """
    Args:
        make: makes the environment, whose methods may be plain or asynchronous; called in the thread.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._instance, self._thread = Instance(make), OwnThread()

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        return await self._thread.run(partial(self._instance.start, prompt, seed=seed, scratch=scratch))

    async def step(self, turn: Turn) -> Observation:
        return await self._thread.run(partial(self._instance.step, turn))

    async def close(self) -> None:
        try:
            await self._thread.run(self._instance.close)
        finally:
            self._thread.end()
