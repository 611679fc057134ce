"""How many trajectories are under way at once: so many for each engine."""

import asyncio
from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.observability.progress import Progress
from slimrl.rewards.loading import Rewards
from slimrl.rollout.stage import RolloutStage


class Episodes:
    """Counts those under way; each lasts until the event loop has had a few turns."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def start(self):
        pass

    async def stop(self):
        pass

    async def run(self, prompt: Prompt, *, trajectory_id: str, **_) -> Trajectory:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        counts = {"num_turns": 1, "num_tool_calls": 0, "num_tool_errors": 0, "num_malformed_calls": 0, "num_retries": 0}
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[],
            status=Status.completed,
            metadata=counts,
        )


class Free:
    """An engine that takes whatever comes, and notes how many sessions it is told of and how many at once."""

    def open(self, session_ids, *, at_once: int) -> None:
        self.announced = (len(session_ids), at_once)

    def close(self, session_id: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(("engines", "at_once", "most"), [(1, 3, 3), (2, 6, 6), (16, 48, 10)])
def test_trajectories_under_way_are_so_many_times_the_engines(engines: int, at_once: int, most: int):
    episodes, engine = Episodes(), Free()
    recipe = Recipe(steps=1)
    recipe.rollout.samples_per_prompt, recipe.rollout.num_engines = 2, engines
    recipe.rollout.max_concurrency_per_engine = 3
    task = SimpleNamespace(
        sandbox=SandboxPool(SandboxConfig()),
        episode_runner=lambda *_: episodes,
        rewards=Rewards(function=lambda trajectory, prompt: 1.0),
        roles=(),
    )
    prompts = [Prompt(prompt_id=str(index), messages=[], label="") for index in range(5)]
    with (
        Progress(1) as progress,
        RolloutStage(recipe, task, engine, progress, watch=lambda: None, flush_caches=lambda: None) as stage,
    ):
        assert len(stage.rollout(prompts, label="step_1")) == 10
    assert episodes.most == most
    assert engine.announced == (10, at_once)
