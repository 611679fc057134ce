"""Advantages, ratios, losses and KL against closed forms and float64 references."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimrl.algorithms import advantages
from slimrl.algorithms.mismatch import k3
from slimrl.algorithms.objective import cross_entropy
from slimrl.algorithms.selection import zero_variance_groups
from slimrl.data.trajectory import Segment, Status, Trajectory


def trajectory(group: str, reward: float, sampled: int) -> Trajectory:
    segment = Segment.not_sampled(np.zeros(sampled + 2, np.int32), np.arange(sampled + 2) >= 2)
    return Trajectory(
        group_id=group, trajectory_id="", segments=[segment], status=Status.completed, reward=reward
    )  # fmt: skip


def group_advantages(rewards, ids, kind, lengths=None) -> np.ndarray:
    lengths = lengths or [3] * len(ids)
    batch = [trajectory(*one) for one in zip(ids, rewards, lengths, strict=True)]
    return advantages.group_advantages([t.reward for t in batch], ids, kind, trajectories=batch)


def test_grpo_advantages_of_a_group_by_hand():
    # rewards 1, 0, 0: mean 1/3, unbiased std sqrt(1/3)
    std = math.sqrt(1 / 3) + 1e-6
    got = group_advantages([1, 0, 0], ["a"] * 3, "grpo")
    assert got == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std])


def test_dr_grpo_and_rloo_by_hand():
    assert group_advantages([1, 0, 0], ["a"] * 3, "dr_grpo") == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages([1, 0, 0], ["a"] * 3, "rloo") == pytest.approx([1.0, -0.5, -0.5])


@pytest.mark.parametrize("kind", [kind.value for kind in advantages.ADVANTAGES])
def test_groups_are_told_by_id_whatever_their_order_and_size(kind):
    rewards, ids = [1, 0, 0.5, 0, 1, 0, 0.25], ["a", "b", "a", "b", "b", "a", "b"]
    mixed = group_advantages(rewards, ids, kind)
    for group in "ab":
        members = [i for i, g in enumerate(ids) if g == group]
        alone = group_advantages([rewards[i] for i in members], [group] * len(members), kind)
        assert mixed[members] == pytest.approx(alone)


def test_equal_rewards_have_zero_advantage_and_are_reported():
    assert group_advantages([0.1] * 3 + [0, 1], ["a"] * 3 + ["b"] * 2, "grpo")[:3].tolist() == [0, 0, 0]
    assert zero_variance_groups([0.1] * 3 + [0, 1], ["a"] * 3 + ["b"] * 2) == {"a"}


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.1 + 0.2, 0.3, 0.3], True),
        ([float(np.float32(0.7)), 0.7, 0.7], True),
        ([float(np.float32(-1e6) / np.float32(3)), -1e6 / 3, -1e6 / 3], True),
        ([sum([0.1] * 10), 1.0, 1.0], True),
        ([0.0, 0.0, 0.0], True),
        ([0.3, 0.300001, 0.3], False),
        ([1e6, 1e6 + 1, 1e6], False),
        ([0.0, 1e-12, 0.0], False),
        ([1e-9, -1e-9, 1e-9], False),
    ],
)
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "opo"])
def test_rewards_that_differ_by_rounding_alone_are_equal(rewards, equal, kind):
    lengths = [SimpleNamespace(num_sampled_tokens=number) for number in (3, 4, 5)]
    found = advantages.group_advantages(rewards, ["a"] * 3, kind, trajectories=lengths)
    assert (found == 0).all() == equal
    assert zero_variance_groups(rewards, ["a"] * 3) == ({"a"} if equal else set())


def test_a_group_of_one_and_a_nan_reward_are_refused():
    with pytest.raises(ValueError, match="group 'b' has one trajectory"):
        group_advantages([1, 0, 1], ["a", "a", "b"], "grpo")
    with pytest.raises(ValueError, match="not finite at \\[1\\]"):
        group_advantages([1, float("nan")], ["a", "a"], "grpo")


def test_opo_weighs_the_baseline_by_length():
    """(1 x 2 + 0 x 6 + 0.5 x 2) / 10 = 0.3."""
    assert group_advantages([1, 0, 0.5], ["a"] * 3, "opo", [2, 6, 2]) == pytest.approx([0.7, -0.3, 0.2])
    assert group_advantages([1, 0], ["a"] * 2, "opo", [0, 0]) == pytest.approx([0.5, -0.5])


def test_the_reward_itself_needs_no_others():
    assert group_advantages([1, 0, 0.5], ["a", "b", "b"], "reward").tolist() == [1, 0, 0.5]


def test_a_users_advantage_is_a_function_of_the_group():
    rewards, ids = [1, 0, 0.5, 2], ["a", "a", "b", "a"]
    assert group_advantages(rewards, ids, "toy_advantage:against_the_best").tolist() == [-1, -2, 0, 0]
    with pytest.raises(ValueError, match=r"toy_advantage:one_for_all gave group 'a' of 2 the advantages 1\.0"):
        group_advantages([1, 0], ["a", "a"], "toy_advantage:one_for_all")


def test_cross_entropy_ignores_masked_nans():
    logprobs = torch.tensor([-1.0, float("nan"), -2.5], requires_grad=True)
    batch = SimpleNamespace(mask_T=torch.tensor([True, False, True]))
    sums = cross_entropy(logprobs, torch.zeros(3), batch)
    sums.loss.backward()
    assert sums.loss.item() == 3.5
    assert logprobs.grad.tolist() == [-1, 0, -1]


def test_k3_expects_the_kl_divergence_of_two_known_distributions():
    """Over all outcomes, each weighed with its probability, in place of samples."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    estimate = k3(np.log(p), np.log(q))
    assert (estimate >= 0).all()
    assert (p * estimate).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-12)


def test_k3_of_one_token_is_its_formula_and_its_exponential_is_bounded():
    """exp(-x) - 1 + x at x = 1, x = -1 and x = 50; at x = -50 the exponential is that of 20."""
    estimate = k3(np.float32([-1.0, -2.0, 0.0, -50.0, -1.0]), np.float32([-2.0, -1.0, -50.0, 0.0, -1.0]))
    assert estimate == pytest.approx([1 / np.e, np.e - 2, 49.0, np.exp(20) - 51, 0.0], rel=1e-12)
