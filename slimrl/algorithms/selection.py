"""Selects the trajectories of a rollout to train on, with their advantages.

1. Failed trajectories, groups of one whose advantage compares, and groups that a filter of the task rejects are left
   out.
2. Every other trajectory gets its advantage within its group.
3. Then trajectories without sampled tokens are left out, and as configured groups of equal rewards and trajectories
   that were not completed.

Groups follow the group id, never position or count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.algorithms.advantages import group_advantages, groups_of, needs_others
from slimrl.config.schema import AlgorithmConfig, TruncationMode
from slimrl.data.trajectory import Status, Trajectory


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The trajectories of a rollout that are trained on."""

    trajectories: list[Trajectory]
    advantages: np.ndarray
    """float32, one per trajectory."""
    zero_variance_fraction: float
    """Fraction of the groups that are large enough and that the filters keep."""


def deal(trajectories: Sequence[Trajectory], num_updates: int) -> list[list[int]]:
    """Indices of each update's trajectories: groups are dealt in turn; fewer updates if there are fewer groups."""
    groups = groups_of([t.group_id for t in trajectories])
    updates: list[list[int]] = [[] for _ in range(min(num_updates, len(groups)))]
    for number, members in enumerate(groups.values()):
        updates[number % len(updates)] += members
    return updates


def apply_truncation_rule(trajectories: Sequence[Trajectory], rule: TruncationMode) -> None:
    """Under the rule `zero`, set positive rewards of truncated and aborted trajectories to 0.

    Penalties stay: otherwise a trajectory would gain by not ending.
    """
    if rule is TruncationMode.zero:
        for trajectory in trajectories:
            if trajectory.status in (Status.truncated, Status.aborted):
                trajectory.reward = min(0.0, trajectory.reward)


def select(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, keeps: Callable[[list[Trajectory]], bool]
) -> Selection:
    """Trajectories to train on with their advantages, in order.

    Args:
        keeps: the task's filters, called with each group that is large enough.
    """
    scored = [t for t in trajectories if t.status is not Status.failed]
    members = groups_of([t.group_id for t in scored])
    least = 2 if needs_others(algorithm.advantage) else 1
    usable = {g for g, own in members.items() if len(own) >= least and keeps([scored[i] for i in own])}
    scored = [t for t in scored if t.group_id in usable]
    ids, rewards = [t.group_id for t in scored], [t.reward for t in scored]
    equal = zero_variance_groups(rewards, ids)
    advantages = group_advantages(scored, algorithm.advantage)
    chosen = [
        index
        for index, trajectory in enumerate(scored)
        if trajectory.num_sampled_tokens
        and not (algorithm.skip_zero_variance and trajectory.group_id in equal)
        and not (algorithm.truncated is TruncationMode.mask and trajectory.status is not Status.completed)
    ]
    return Selection(
        trajectories=[scored[i] for i in chosen],
        advantages=advantages[chosen],
        zero_variance_fraction=len(equal) / len(usable) if usable else 0.0,
    )


def zero_variance_groups(rewards_N: Sequence[float], group_ids_N: Sequence[str]) -> set[str]:
    """Groups whose rewards are all equal, so that every advantage is 0."""
    return {
        group_id
        for group_id, members in groups_of(group_ids_N).items()
        if len(members) > 1 and len({float(rewards_N[i]) for i in members}) == 1
    }
