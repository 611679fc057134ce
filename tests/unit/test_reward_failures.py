"""A reward that fails costs one trajectory, and stops the run where too many fail; engine and episode are stand-ins."""

import asyncio
import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from slimrl.config.schema import Recipe
from slimrl.data.trajectory import Prompt, Status, Trajectory
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.rollout_stage import RolloutStage

PROMPTS = [Prompt(prompt_id=f"p:{number}", messages=[], label=number) for number in range(10)]


class Episodes:
    async def run(self, prompt, *, trajectory_id, sampling, seed):
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[],
            status=Status.completed,
            metadata={"num_turns": 1},
        )


class Engine:
    def open(self, session_ids, *, at_once):
        pass

    def close(self, session_id):
        pass

    async def aclose(self):
        pass


class Progress:
    @contextmanager
    def phase(self, *_):
        yield SimpleNamespace(advance=lambda: None)


def rollout(reward, *, limit=0.1):
    recipe = Recipe()
    recipe.rollout.samples_per_prompt = 1
    recipe.rollout.max_failed_fraction = limit
    recipe.reward.function = "task:judge"
    task = SimpleNamespace(reward=reward, episode_runner=lambda *_: Episodes())
    with RolloutStage(recipe, task, Engine(), Progress(), watch=lambda: None, flush_caches=lambda: None) as stage:
        return stage.rollout(PROMPTS, label="step_000001")


def refuse(trajectory, prompt):
    raise ConnectionRefusedError("the judge is away")


async def refuse_later(trajectory, prompt):
    await asyncio.sleep(0)
    refuse(trajectory, prompt)


def fails_for(labels, failure=refuse):
    """A reward of 1 for all labels but these."""
    return lambda trajectory, prompt: failure(trajectory, prompt) if prompt.label in labels else 1.0


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (refuse, "ConnectionRefusedError: the judge is away"),
        (refuse_later, "ConnectionRefusedError: the judge is away"),
        (lambda trajectory, prompt: sys.exit(3), "TaskCodeExited: it raised SystemExit(3)"),
        (lambda trajectory, prompt: None, "ValueError: the reward function returned reward = None"),
    ],
    ids=["refused", "refused later", "exit", "none"],
)
def test_a_reward_that_fails_once_costs_one_trajectory(failure, cause):
    trajectories = rollout(fails_for({3}, failure))
    assert [t.status is Status.failed for t in trajectories] == [number == 3 for number in range(10)]
    assert trajectories[3].metadata["error"].startswith(f"task:judge failed: {cause}")
    assert math.isnan(trajectories[3].reward)
    assert [t.reward for t in trajectories if t.status is Status.completed] == [1.0] * 9


def test_rewards_that_fail_above_the_limit_stop_the_run_with_their_cause():
    assert len(rollout(fails_for({1, 2}), limit=0.2)) == 10
    with pytest.raises(
        RunError, match=r"^rollout: 3 of 10 .* = 0\.2 allows: task:judge failed: Connection.*the judge is away$"
    ):
        rollout(fails_for({1, 2, 3}), limit=0.2)
