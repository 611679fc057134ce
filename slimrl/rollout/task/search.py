"""The search over the steps of a recipe's episodes, and the function that says how good a state is."""

import math
from collections.abc import Callable
from typing import Any

from slimrl.agent.tools import ToolsUnavailable
from slimrl.agent.tree_search.search import TreeSearch
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardPartConfig
from slimrl.config.schema.search import SearchMethod
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.loading import Rewards, Supplies, load_part, load_rewards
from slimrl.rewards.parts import SingleReward
from slimrl.rewards.scoring import score
from slimrl.rewards.services import NotStarted, RewardServices


class RewardValue:
    """A reward as the value of states: the trajectory's own plus those of its turns.

    Args:
        startup_timeout_s: of each start and close.
        timeout_s: of a value.
    """

    def __init__(self, rewards: Rewards, *, startup_timeout_s: float, timeout_s: float) -> None:
        self._rewards, self._timeout_s = rewards, timeout_s
        self._services = RewardServices(rewards.parts, timeout_s=startup_timeout_s)

    async def start(self) -> None:
        """Raises ToolsUnavailable: the function did not start."""
        try:
            await self._services.start()
        except NotStarted as error:
            raise ToolsUnavailable(f"agent.search.value: {error}") from error

    async def stop(self) -> None:
        await self._services.close()

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises what the function raises, ValueError for something else than a number, TimeoutError."""
        await score(trajectory, prompt, self._rewards.function, self._timeout_s)
        return trajectory.reward + math.fsum(trajectory.turn_rewards)


def load_search(recipe: Recipe, get: Callable[[str, Callable[[], Any]], Any], supplies: Supplies) -> TreeSearch | None:
    """None for a recipe that does not search, or whose function cannot be loaded.

    Args:
        get: see load_rewards.
    """
    settings = recipe.agent.search
    if settings.method is SearchMethod.off:
        return None
    if settings.value.function:
        part = RewardPartConfig(function=settings.value.function, args=settings.value.args)
        loaded = get("agent.search.value.function", lambda: load_part("", part, supplies=supplies))
        rewards = None if loaded is None else Rewards(function=SingleReward(part=loaded), parts=[loaded])
    else:
        rewards = load_rewards(recipe.reward, get, supplies)
    if rewards is None:
        return None
    value = RewardValue(
        rewards, startup_timeout_s=recipe.reward.startup_timeout_s, timeout_s=recipe.rollout.trajectory_timeout_s
    )
    return TreeSearch(
        settings=settings, value=value, parallel=not recipe.deterministic, trains=recipe.algorithm.given_by_turn
    )
