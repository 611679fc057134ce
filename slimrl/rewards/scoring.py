"""What a reward function is, and how one is applied to a trajectory."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from slimrl.data.threads import in_thread
from slimrl.data.trajectory import Prompt, Status, Trajectory

Parts = float | dict[str, float]
RewardFunction = Callable[[Trajectory, Prompt], Parts | Awaitable[Parts]]
"""Gives the reward, or its named parts, whose sum is the reward. Synchronous or asynchronous."""


async def score(trajectory: Trajectory, prompt: Prompt, function: RewardFunction, timeout_s: float) -> None:
    """Set `reward` and `rewards` of a trajectory; a failed one keeps its NaN.

    A synchronous function runs in a thread of its own, so that a slow one holds up neither the episodes under way nor
    the end of the run.

    Raises:
        TimeoutError: no reward within `timeout_s`.
        ValueError: the function gave something else than finite numbers.
    """
    if trajectory.status is Status.failed:
        return
    async with asyncio.timeout(timeout_s):
        if inspect.iscoroutinefunction(function):
            value = await function(trajectory, prompt)
        else:
            value = await in_thread(partial(function, trajectory, prompt))
    parts = value if isinstance(value, dict) else {"reward": value}
    for name, part in parts.items():
        if not _is_finite(part):
            raise ValueError(
                f"the reward function gave {name} = {part!r} for {trajectory.trajectory_id}; finite numbers are needed"
            )
    trajectory.rewards = {name: float(part) for name, part in parts.items()}
    trajectory.reward = math.fsum(trajectory.rewards.values())


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
