"""One instance of an environment whose methods may be plain or asynchronous, called from one thread alone."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt


class Instance:
    """Calls an environment in this thread, which has no event loop that runs.

    Args:
        make: makes the environment; called by `start`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._runner: asyncio.Runner | None = None
        """Runs asynchronous methods, all in one event loop; None before the first"""
        self._environment: Any = None

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._environment = self._make()
        return self._result(self._environment.start(prompt, seed=seed, scratch=scratch))

    def step(self, turn: Turn) -> Observation:
        return self._result(self._environment.step(turn))

    def close(self) -> None:
        """Close the environment, if it was made."""
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                self._result(environment.close())
        finally:
            if self._runner is not None:
                self._runner.close()

    def _result(self, value: Any) -> Any:
        if not inspect.iscoroutine(value):
            return value
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(value)
