"""Advantages of the trajectories of a group. Groups follow the group id, never position."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.config.algorithms import COMPARING
from slimrl.config.import_path import resolve
from slimrl.config.schema.algorithm import AdvantageName
from slimrl.data.trajectory import Trajectory

STD_EPSILON = 1e-6
"""Epsilon added to the standard deviation of a group."""

SAME_REWARD = 4 * 2.0**-23
"""Relative difference up to which rewards of a group are equal: four roundings of float32, in which services and sums
of parts may compute them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The scored trajectories of one prompt."""

    rewards_N: np.ndarray
    """float64, rewards of the trajectories"""
    trajectories: Sequence[Trajectory]
    """The trajectories; empty where turns are compared"""


GroupAdvantage = Callable[[Group], np.ndarray]
"""Function that gives the advantages [N] of a group."""


def grpo(group: Group) -> np.ndarray:
    """(r - mean) / (std + 1e-6) with the unbiased std (arXiv:2402.03300); 0 where all rewards are equal."""
    rewards = group.rewards_N
    return np.zeros_like(rewards) if are_equal(rewards) else dr_grpo(group) / (rewards.std(ddof=1) + STD_EPSILON)


def dr_grpo(group: Group) -> np.ndarray:
    """r - mean (arXiv:2503.20783)."""
    return group.rewards_N - group.rewards_N.mean()


def rloo(group: Group) -> np.ndarray:
    """r minus the mean of the others (arXiv:2402.14740)."""
    size = len(group.rewards_N)
    return dr_grpo(group) * size / (size - 1)


def opo(group: Group) -> np.ndarray:
    """r minus the mean weighted by the number of sampled tokens (arXiv:2505.23585, eq. 7)."""
    lengths = np.array([trajectory.num_sampled_tokens for trajectory in group.trajectories])
    return group.rewards_N - np.average(group.rewards_N, weights=lengths if lengths.any() else None)


def reward(group: Group) -> np.ndarray:
    return group.rewards_N


def none(group: Group) -> np.ndarray:
    return np.zeros_like(group.rewards_N)


ADVANTAGES: dict[AdvantageName, GroupAdvantage] = {
    AdvantageName.grpo: grpo,
    AdvantageName.dr_grpo: dr_grpo,
    AdvantageName.rloo: rloo,
    AdvantageName.opo: opo,
    AdvantageName.reward: reward,
    AdvantageName.none: none,
    # The ranks estimate advantages from it and the critic's values.
    AdvantageName.gae: reward,
}


def are_equal(rewards_N: np.ndarray) -> bool:
    """Whether all rewards of a group are equal up to rounding (SAME_REWARD)."""
    return bool(np.ptp(rewards_N) <= SAME_REWARD * np.abs(rewards_N).max())


def load_advantage(name: str) -> GroupAdvantage:
    """The advantage of a recipe, by its name or import path.

    Raises:
        ValueError: the import path leads to no function, or to one of other arguments.
    """
    assert name != AdvantageName.given, "the task gives these"
    if name in AdvantageName.__members__:
        return ADVANTAGES[AdvantageName(name)]
    return resolve(name, arguments=("group",))


def group_advantages(
    rewards_N: Sequence[float],
    group_ids_N: Sequence[str],
    name: str,
    *,
    trajectories: Sequence[Trajectory] | None = None,
) -> np.ndarray:
    """Advantage of each reward within its group, float32 [N].

    Args:
        rewards_N: finite rewards.
        group_ids_N: the group of each.
        name: of the advantage, or its import path.
        trajectories: those of the rewards, for advantages that read more than these.

    Raises:
        ValueError: a reward that is not finite, a group of one where others are needed, or a function that returned
            something else than one finite number for each trajectory.
    """
    advantage, rewards = load_advantage(name), np.asarray(rewards_N, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards that are not finite at {np.flatnonzero(~np.isfinite(rewards)).tolist()[:8]}")
    advantages = np.zeros(len(rewards), np.float64)
    for group_id, members in groups_of(group_ids_N).items():
        if len(members) == 1 and name in COMPARING:
            raise ValueError(f"group {group_id!r} has one trajectory, so there is no baseline")
        if name in COMPARING and are_equal(rewards[members]):
            continue
        of_group = [trajectories[i] for i in members] if trajectories is not None else []
        group = Group(rewards_N=rewards[members], trajectories=of_group)
        found = np.asarray(advantage(group), np.float64)
        if found.shape != (len(members),) or not np.isfinite(found).all():
            raise ValueError(f"{name} gave group {group_id!r} of {len(members)} the advantages {found.tolist()}")
        advantages[members] = found
    with np.errstate(over="ignore"):
        # One beyond 32 bits is infinite: the update that has it is skipped, and names it.
        return advantages.astype(np.float32)


def groups_of(group_ids_N: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the members of each group, in order of first appearance."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(group_ids_N):
        groups[group_id].append(index)
    return dict(groups)
