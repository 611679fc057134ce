"""What is made of rewards before advantages: overlong penalties, and the best and worst of groups."""

import numpy as np
import pytest

from slimrl.algorithms.selection import select
from slimrl.algorithms.shaping import overlong_penalty, shape_rewards
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.credit import OverlongConfig, SelectionConfig, SelectionMode
from slimrl.config.schema.data import TruncationMode
from slimrl.data.trajectory import Segment, Status, Trajectory


def trajectory(group: str, name: str, reward: float, tokens: int = 1, status=Status.completed) -> Trajectory:
    mask = np.array([False] + [True] * tokens)
    return Trajectory(
        group_id=group,
        trajectory_id=f"{group}/{name}",
        segments=[
            Segment(
                tokens=np.zeros(len(mask), np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(len(mask), np.float32),
                weight_versions=np.where(mask, 0, -1).astype(np.int32),
                turn_ids=np.where(mask, 0, -1).astype(np.int16),
            )
        ],
        status=status,
        reward=reward,
        rewards={"answer": reward},
    )


def chosen(batch: list[Trajectory], **selection) -> dict[str, float]:
    algorithm = AlgorithmConfig(advantage="dr_grpo", selection=SelectionConfig(**selection))
    found = select(batch, algorithm, lambda group: True, step=1)
    return dict(zip([t.trajectory_id for t in found.trajectories], found.advantages.tolist(), strict=True))


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (75, 0.0), (76, -0.02), (80, -0.1), (99, -0.48), (100, -0.5), (500, -0.5)]
)
def test_the_penalty_grows_over_the_buffer_before_the_maximum(tokens, expected):
    """DAPO, eq. 13, with a maximum of 100, a cache of 25 and half of the punishment."""
    assert overlong_penalty(tokens, OverlongConfig(max_tokens=100, buffer_tokens=25, penalty=0.5)) == pytest.approx(
        expected
    )


def test_the_penalty_is_a_named_part_and_the_rule_for_truncated_ones_does_not_cancel_it():
    batch = [
        trajectory("a", "short", 1.0, 2),
        trajectory("a", "long", 1.0, 9),
        trajectory("a", "cut", 1.0, 10, Status.truncated),
        trajectory("a", "failed", float("nan"), 10, Status.failed),
    ]
    for one in batch:
        one.turn_rewards = [0.5]
    overlong = OverlongConfig(max_tokens=10, buffer_tokens=4)
    shape_rewards(batch, AlgorithmConfig(truncated=TruncationMode.zero, overlong=overlong))
    assert [t.reward for t in batch[:3]] == [1.0, 0.25, -1.0]
    assert [t.rewards.get("overlong") for t in batch] == [0.0, -0.75, -1.0, None]
    assert [t.turn_rewards for t in batch] == [[0.5], [0.5], [0.0], [0.5]]


def test_without_a_maximum_no_reward_changes():
    batch = [trajectory("a", "0", 1.0, 10_000)]
    shape_rewards(batch, AlgorithmConfig())
    assert (batch[0].reward, batch[0].rewards) == (1.0, {"answer": 1.0})


REWARDS = [0.3, 0.9, 0.0, 0.6, 0.1]


@pytest.mark.parametrize("order", [1, -1])
def test_the_best_and_the_worst_keep_the_baseline_of_the_whole_group(order):
    batch = [trajectory("a", str(i), reward) for i, reward in enumerate(REWARDS)]
    other = [trajectory("b", str(i), float(i)) for i in range(2)]
    got = chosen([*batch, *other][::order], mode=SelectionMode.best_and_worst, count=1)
    mean = sum(REWARDS) / 5
    assert got == pytest.approx({"a/1": 0.9 - mean, "a/2": -mean, "b/0": -0.5, "b/1": 0.5}, rel=1e-6)


@pytest.mark.parametrize("order", [1, -1])
def test_equal_rewards_are_ranked_by_their_ids(order):
    batch = [trajectory("a", str(i), reward) for i, reward in enumerate([1.0, 1.0, 0.0, 0.0])]
    assert chosen(batch[::order], mode=SelectionMode.best_and_worst, count=1).keys() == {"a/0", "a/3"}


def test_rejection_sampling_keeps_good_trajectories_alone_with_advantage_one():
    batch = [trajectory("a", str(i), reward) for i, reward in enumerate(REWARDS)]
    same = [trajectory("b", str(i), 1.0) for i in range(3)]
    alone, bad = [trajectory("c", "0", 0.5)], [trajectory("d", str(i), 0.1 * i) for i in range(3)]
    got = chosen([*batch, *same, *alone, *bad], mode=SelectionMode.best, count=2, min_reward=0.5)
    assert got == dict.fromkeys(["a/1", "a/3", "b/0", "b/1", "c/0"], 1.0)


def test_what_is_not_trained_on_takes_no_place_among_the_best():
    batch = [
        trajectory("a", "cut", 1.0, 1, Status.truncated),
        trajectory("a", "empty", 0.9, 0),
        *(trajectory("a", str(i), reward) for i, reward in enumerate(REWARDS)),
    ]
    algorithm = AlgorithmConfig(
        truncated=TruncationMode.mask,
        advantage="dr_grpo",
        selection=SelectionConfig(mode=SelectionMode.best_and_worst, count=1),
    )
    found = select(batch, algorithm, lambda group: True, step=1)
    assert [t.trajectory_id for t in found.trajectories] == ["a/1", "a/2"]
    mean = (1.9 + 1.9) / 7
    assert found.advantages == pytest.approx([0.9 - mean, -mean], rel=1e-6)
