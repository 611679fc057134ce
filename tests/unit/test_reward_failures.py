"""A reward that fails costs one trajectory, and stops the run where too many fail; engine and episode are stand-ins."""

import asyncio
import math
import sys
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.errors import RunError
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.loading import Rewards
from slimrl.rewards.parts import Part, PartsReward, SingleReward
from slimrl.rollout.stage import RolloutStage

PROMPTS = [Prompt(prompt_id=f"p:{number}", messages=[], label=number) for number in range(10)]


class Episodes:
    async def start(self):
        pass

    async def stop(self):
        pass

    async def run(self, prompt, *, trajectory_id, sampling, seed):
        return Trajectory(
            group_id=prompt.prompt_id,
            trajectory_id=trajectory_id,
            segments=[],
            status=Status.completed,
            metadata={"num_turns": 1, "num_tool_calls": 0},
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


def stage_of(rewards, *, limit=0.1, samples=1, timeout_s=60.0, **settings):
    recipe = Recipe()
    recipe.rollout.trajectory_timeout_s = timeout_s
    recipe.rollout.samples_per_prompt = samples
    recipe.rollout.max_failed_fraction = limit
    recipe.reward = RewardConfig(function="task:judge", **settings)
    task = SimpleNamespace(
        sandbox=SandboxPool(SandboxConfig()), rewards=rewards, roles=(), episode_runner=lambda *_: Episodes()
    )
    return RolloutStage(recipe, task, Engine(), Progress(), watch=lambda: None, flush_caches=lambda: None)


def rollout(reward, *, limit=0.1):
    with stage_of(Rewards(function=reward), limit=limit) as stage:
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


def test_a_part_that_fails_is_named_with_the_trajectory_s_other_causes():
    part = Part(name="judge", function=fails_for({3}), path="task:judge")
    with stage_of(Rewards(function=PartsReward(parts=[part]))) as stage:
        trajectories = stage.rollout(PROMPTS, label="step_000001")
    assert trajectories[3].metadata["error"] == ("judge (task:judge) failed: ConnectionRefusedError: the judge is away")
    with stage_of(
        Rewards(function=SingleReward(part=Part(name="", function=fails_for({3}), path="task:one")))
    ) as stage:
        trajectories = stage.rollout(PROMPTS, label="step_000001")
    assert trajectories[3].metadata["error"] == "task:one failed: ConnectionRefusedError: the judge is away"


async def hangs(trajectory, prompt):
    await asyncio.sleep(60)


def test_the_parts_that_miss_the_deadline_are_named():
    parts = [
        Part(name="quick", function=lambda trajectory, prompt: 1.0, path="task:quick"),
        Part(name="slow", function=hangs, path="task:hangs"),
    ]
    with stage_of(Rewards(function=PartsReward(parts=parts)), limit=1.0, timeout_s=0.3) as stage:
        (trajectory,) = stage.rollout(PROMPTS[:1], label="step_000001")
    assert "no reward within 0.3 s from slow (task:hangs)" in trajectory.metadata["error"]
    with stage_of(Rewards(function=SingleReward(part=parts[1])), limit=1.0, timeout_s=0.3) as stage:
        (trajectory,) = stage.rollout(PROMPTS[:1], label="step_000001")
    assert trajectory.metadata["error"] == "task:judge failed: TimeoutError: no reward within 0.3 s"


class Stubborn:
    """Ignores that it is cancelled, until it is released or 5 s are over."""

    released = False

    async def __call__(self, trajectory, prompt):
        begun = time.monotonic()
        while not self.released and time.monotonic() < begun + 5:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["alone", "parts", "group"])
def test_a_reward_that_ignores_its_deadline_fails_its_trajectory_in_time(monkeypatch, place):
    monkeypatch.setattr("slimrl.rewards.deadline.END_S", 0.1)
    stubborn = Stubborn()
    parts = [
        Part(name="stubborn", function=stubborn, path="task:s"),
        Part(name="quick", function=lambda *_: 1.0, path="task:q"),
    ]
    rewards = {
        "alone": Rewards(function=stubborn),
        "parts": Rewards(function=PartsReward(parts=parts)),
        "group": Rewards(function=lambda *_: 1.0, group=parts[:1]),
    }[place]
    begun = time.monotonic()
    with stage_of(rewards, limit=1.0, timeout_s=0.2) as stage:
        (trajectory,) = stage.rollout(PROMPTS[:1], label="step_000001")
        stubborn.released = True
    assert time.monotonic() - begun < 3
    assert "no reward within 0.2 s" in trajectory.metadata["error"]
    assert ("stubborn (task:s)" in trajectory.metadata["error"]) == (place != "alone")


def test_a_part_that_ignores_its_end_does_not_hold_up_the_failure_of_another():
    stubborn = Stubborn()
    parts = [
        Part(name="stubborn", function=stubborn, path="task:s"),
        Part(name="away", function=refuse, path="task:r"),
    ]
    begun = time.monotonic()
    with stage_of(Rewards(function=PartsReward(parts=parts)), limit=1.0) as stage:
        (trajectory,) = stage.rollout(PROMPTS[:1], label="step_000001")
        stubborn.released = True
    assert time.monotonic() - begun < 3
    assert trajectory.metadata["error"] == "away (task:r) failed: ConnectionRefusedError: the judge is away"


def ranks(trajectories, prompt):
    """The samples of a prompt in their order, those of prompt 3 not at all."""
    if prompt.label == 3:
        raise ConnectionRefusedError("no ranking")
    return [float(number) for number in range(len(trajectories))]


def test_a_group_is_rewarded_when_it_has_ended_and_fails_as_a_whole_but_evaluations_have_none():
    rewards = Rewards(
        function=lambda trajectory, prompt: 1.0,
        group=[Part(name="rank", function=ranks, path="task:ranks", weight=0.1)],
    )
    with stage_of(rewards, samples=3) as stage:
        trajectories = stage.rollout(PROMPTS, label="step_000001")
        evaluated = stage.evaluate("heldout", PROMPTS, label="eval")
    assert [t.rewards for t in trajectories[:3]] == [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}]
    assert [t.reward for t in trajectories[:3]] == [1.0, 1.1, 1.2]
    failed = {t.metadata["error"] for t in trajectories if t.status is Status.failed}
    assert failed == {"rank (task:ranks) failed: ConnectionRefusedError: no ranking"}
    assert [t.status is Status.failed for t in trajectories] == [9 <= number < 12 for number in range(30)]
    assert [(item.reward, item.rewards) for item in evaluated] == [(1.0, {})] * 10


class Service:
    """Counts in a task of its own, which nobody but itself may end."""

    def __init__(self, *, starts=True):
        self.starts, self.journal = starts, []

    async def start(self):
        if not self.starts:
            raise OSError("no route to the judge")
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        self.journal.append("start")

    async def close(self):
        self.journal.append("close" if not self.task.done() else "its task was ended before it")
        self.task.cancel()

    async def __call__(self, trajectory, prompt):
        self.journal.append("score")
        return 1.0


def test_a_reward_is_started_before_the_first_rollout_and_closed_at_the_end():
    service = Service()
    part = Part(name="judge", function=service, path="task:Judge")
    with stage_of(Rewards(function=PartsReward(parts=[part]), parts=[part])) as stage:
        assert service.journal == ["start"]
        for label in ("step_000001", "step_000002"):
            stage.rollout(PROMPTS[:1], label=label)
    assert service.journal == ["start", "score", "score", "close"]


def test_a_reward_that_does_not_start_stops_the_run_and_closes_the_others():
    service = Service()
    parts = [Part(name=f"p{n}", function=one, path="task:S") for n, one in enumerate([service, Service(starts=False)])]
    with (
        pytest.raises(RunError, match=r"^p1 \(task:S\): start failed: OSError: no route to the judge$"),
        stage_of(Rewards(function=PartsReward(parts=parts), parts=parts)),
    ):
        pytest.fail("it started")
    assert service.journal == ["start", "close"]
