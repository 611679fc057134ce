"""Rewards of a whole group: called once the last trajectory of a prompt has ended, and added as parts."""

import asyncio
import math

import pytest
from reward_cases import asked, said

from slimrl.data.trajectory import Status
from slimrl.rewards.groups import score_group
from slimrl.rewards.parts import Part, PartFailed
from slimrl.rewards.retries import NO_RETRIES, Retries
from slimrl.rollout.groups import Group


def group(*rewards):
    found = [said("x", name=str(number)) for number in range(len(rewards))]
    for trajectory, reward in zip(found, rewards, strict=True):
        trajectory.reward = reward
    return found


def part(function, **settings):
    return Part(name="rank", function=function, path="task:rank", **settings)


def add(trajectories, *parts, timeout_s=10.0, retries=NO_RETRIES):
    asyncio.run(score_group(trajectories, asked(), parts, timeout_s, retries))


def numbers(trajectories, prompt):
    return [float(trajectory.trajectory_id) for trajectory in trajectories]


async def numbers_later(trajectories, prompt):
    return numbers(trajectories, prompt)


@pytest.mark.parametrize("function", [numbers, numbers_later])
def test_each_trajectory_gets_its_number_as_a_capped_and_weighted_part(function):
    trajectories = group(1.0, 1.0, 1.0, 1.0)
    add(trajectories, part(function, cap=2.0, weight=0.5))
    assert [t.reward for t in trajectories] == [1.0, 1.5, 2.0, 2.0]
    assert [t.rewards for t in trajectories] == [{"rank": 0.0}, {"rank": 1.0}, {"rank": 2.0}, {"rank": 3.0}]


def test_a_snapshot_for_a_checkpoint_keeps_the_rewards_of_roles_from_before():
    """Else a run that continues would add the group's reward to them a second time."""
    trajectories = group(1.0, 1.0)
    for trajectory in trajectories:
        trajectory.role_rewards = {"left": 0.5}
    of_group = Group(number=0, prompt=asked(), ids=["0", "1"], done={t.trajectory_id: t for t in trajectories})
    before = of_group.snapshot()
    add(trajectories, part(numbers))
    assert [t.role_rewards for t in trajectories] == [{"left": 0.5}, {"left": 1.5}]
    assert [(t.reward, t.role_rewards) for t in before.trajectories] == [(1.0, {"left": 0.5})] * 2


def test_failed_trajectories_are_not_shown_to_it_and_a_group_of_them_alone_is_not_scored():
    trajectories = group(1.0, 1.0, 1.0)
    trajectories[0].status = Status.failed
    trajectories[1].status = Status.aborted
    add(trajectories, part(numbers))
    assert [t.rewards for t in trajectories] == [{}, {"rank": 1.0}, {"rank": 2.0}]
    trajectories = group(1.0)
    trajectories[0].status = Status.failed
    add(trajectories, part(lambda *_: pytest.fail("nothing to score")))


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        ([1.0], "ValueError: it returned 1 numbers for 2 trajectories"),
        ([1.0, math.nan], "ValueError: the reward function returned rank = nan"),
        (None, "TypeError"),
        (ConnectionError("away"), "ConnectionError: away"),
    ],
)
def test_one_that_fails_names_itself_and_changes_no_trajectory(result, cause):
    def function(trajectories, prompt):
        if isinstance(result, Exception):
            raise result
        return result

    trajectories = group(1.0, 2.0)
    with pytest.raises(PartFailed, match=rf"^rank \(task:rank\) failed: {cause}"):
        add(trajectories, part(numbers), part(function))
    assert [(t.reward, t.rewards) for t in trajectories] == [(1.0, {}), (2.0, {})]


def test_it_has_a_deadline_and_is_repeated_like_any_reward():
    async def never(trajectories, prompt):
        await asyncio.sleep(60)

    with pytest.raises(PartFailed, match=r"TimeoutError: no reward within 0\.05 s$"):
        add(group(1.0), part(never), timeout_s=0.05)
    calls = []

    def once(trajectories, prompt):
        calls.append(len(trajectories))
        if len(calls) == 1:
            raise ConnectionError
        return [1.0] * len(trajectories)

    trajectories = group(0.0, 0.0)
    add(trajectories, part(once), retries=Retries(limit=1, errors=(OSError,), first_delay_s=0.001))
    assert calls == [2, 2]
    assert [t.metadata["num_reward_retries"] for t in trajectories] == [1, 1]
