"""A reward that is a part of another one: shaping that depends on whether the answer is right."""

import inspect
from collections.abc import Mapping
from typing import Any

from slimrl.base.threads import call_task_code
from slimrl.config.schema.reward import RewardPartConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.loading import Supplies, load_part
from slimrl.rewards.scoring import finite_number


class OfVerifier:
    """What rewards around a verifier share: a reward that gives 0 to 1 for an answer. It starts and closes with them.

    Args:
        of: its import path, as `function` in `reward.parts`.
        of_args: its `args`.

    Raises:
        ValueError: there is no such function, or it takes other arguments.
    """

    def __init__(self, of: str, of_args: Mapping[str, Any] | None, supplies: Supplies) -> None:
        settings = RewardPartConfig(function=of, args=dict(of_args or {}))
        self._verifier = load_part("of", settings, supplies=supplies)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the verifier refuses a prompt when it is read."""
        check = getattr(self._verifier.function, "check_prompt", None)
        if check is not None:
            check(prompt)

    async def start(self) -> None:
        await self._call("start")

    async def close(self) -> None:
        await self._call("close")

    async def correctness(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError if it is not from 0 to 1, and what the verifier raises."""
        value = await call_task_code(self._verifier.function, trajectory, prompt)
        right = finite_number(value, self._verifier.path)
        if not 0 <= right <= 1:
            raise ValueError(f"{self._verifier.path} gave {right:g}; it must give 0 to 1 here")
        return right

    async def _call(self, name: str) -> None:
        method = getattr(self._verifier.function, name, None)
        if inspect.iscoroutinefunction(method):
            await method()
