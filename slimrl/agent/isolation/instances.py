"""An environment and its copies, whose methods may be plain or asynchronous, called from one thread alone."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from slimrl.agent.environment import Observation, Turn
from slimrl.data.prompt import Prompt


class Instances:
    """Calls environments in this thread, which has no event loop that runs. The first has the number 0.

    Args:
        make: makes the first environment; called by `start`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._runner: asyncio.Runner | None = None
        """Runs asynchronous methods, all in one event loop; None before the first"""
        self._by_number: dict[int, Any] = {}
        self._num_made = 0

    def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        made = self._make()
        self._keep(made)
        return self._result(made.start(prompt, seed=seed, scratch=scratch))

    def step(self, number: int, turn: Turn) -> Observation:
        return self._result(self._by_number[number].step(turn))

    def copy(self, number: int, *, scratch: dict[str, Any]) -> int | None:
        """Number of a copy of this one; None if the class makes no copies, or the instance cannot now.

        Args:
            scratch: of the copy.
        """
        if not hasattr(self._by_number[number], "copy"):
            return None
        made = self._result(self._by_number[number].copy(scratch=scratch))
        return None if made is None else self._keep(made)

    def close(self, number: int) -> bool:
        """Close an environment, if it was made; says whether it was the last one."""
        environment = self._by_number.pop(number, None)
        try:
            if environment is not None:
                self._result(environment.close())
        finally:
            if not self._by_number and self._runner is not None:
                self._runner.close()
        return not self._by_number

    def close_all(self) -> None:
        for number in list(self._by_number):
            self.close(number)

    def _keep(self, made: Any) -> int:
        number, self._num_made = self._num_made, self._num_made + 1
        self._by_number[number] = made
        return number

    def _result(self, value: Any) -> Any:
        if not inspect.iscoroutine(value):
            return value
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(value)
