"""A reward that is a part of another one: shaping that depends on whether the answer is right."""

import inspect
from collections.abc import Mapping
from typing import Any

from slimrl.config.schema.reward import RewardPartConfig
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.loading import Supplies, load_part
from slimrl.rewards.scoring import call_reward, finite_number


class Verifier:
    """A reward that gives 0 to 1 for an answer, by its import path.

    Args:
        function: as in `reward.parts`, with its `args`.

    Raises:
        ValueError: there is no such function, or it takes other arguments.
    """

    def __init__(self, function: str, args: Mapping[str, Any] | None, supplies: Supplies) -> None:
        settings = RewardPartConfig(function=function, args=dict(args or {}))
        self._part = load_part("of", settings, supplies=supplies)

    async def start(self) -> None:
        await self._call("start")

    async def close(self) -> None:
        await self._call("close")

    async def correctness(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError if it is not from 0 to 1, and what the reward raises."""
        value = await call_reward(self._part.function, trajectory, prompt)
        right = finite_number(value, self._part.path)
        if not 0 <= right <= 1:
            raise ValueError(f"{self._part.path} gave {right:g}; it must give 0 to 1 here")
        return right

    async def _call(self, name: str) -> None:
        method = getattr(self._part.function, name, None)
        if inspect.iscoroutinefunction(method):
            await method()


class OfVerifier:
    """What rewards around a verifier share: it starts and closes with them."""

    def __init__(self, of: str, of_args: Mapping[str, Any] | None, supplies: Supplies) -> None:
        self._verifier = Verifier(of, of_args, supplies)

    async def start(self) -> None:
        await self._verifier.start()

    async def close(self) -> None:
        await self._verifier.close()
