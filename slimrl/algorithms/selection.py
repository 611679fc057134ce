"""Selects the trajectories that the updates of a rollout consist of, with their advantages.

1. Failed trajectories, groups of one whose advantage compares, and groups that a filter of the task rejects are left
   out. Those of several roles become one of each role, in a group of the role (slimrl/data/roles.py).
2. Every other trajectory gets its advantage within its group, and as configured advantages of its turns.
3. Then trajectories without sampled tokens are left out, and as configured those that were not completed and those
   that are neither among the best nor the worst of their group.

Zero-variance groups, whose advantages are all 0, stay: they count in the means of an update, whether its passes need
them or not (`slimrl/algorithms/passes.py`).

Groups follow the group id, never position or count.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.algorithms.advantages import are_equal, group_advantages, groups_of
from slimrl.algorithms.turn_credit import (
    advantages_by_turn,
    gigpo_advantages,
    mixed_reward,
    stage_weights,
    turn_returns,
    weighted,
)
from slimrl.config.algorithms import COMPARING
from slimrl.config.schema.algorithm import AdvantageName, AlgorithmConfig
from slimrl.config.schema.credit import CreditName, SelectionConfig, SelectionMode
from slimrl.config.schema.data import TruncationMode
from slimrl.data.roles import by_role
from slimrl.data.trajectory import Status, Trajectory

ROUNDING = 1e-9
"""Largest magnitude of turns' advantages that counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The N trajectories of a rollout that its updates consist of."""

    trajectories: list[Trajectory]
    advantages: np.ndarray
    """float32 [N]"""
    zero_variance: np.ndarray
    """bool [N], those of zero-variance groups: all advantages of the group are 0"""
    num_groups: int
    """Number of groups that the filters keep"""
    num_zero_variance: int
    """Number of zero-variance groups among these"""
    turn_advantages: list[np.ndarray] | None = None
    """float32 [turns] of each trajectory; None if turns have the advantage of their trajectory."""

    @property
    def zero_variance_fraction(self) -> float:
        """Fraction of zero-variance groups among those that the filters keep."""
        return self.num_zero_variance / self.num_groups if self.num_groups else 0.0

    @property
    def is_useful(self) -> bool:
        """Whether it has trajectories of another than a zero-variance group."""
        return not self.zero_variance.all()


def joined(selections: Sequence[Selection]) -> Selection:
    """The selections of several groups as that of all of them, in order."""
    by_turn = [one.turn_advantages for one in selections if one.turn_advantages is not None]
    return Selection(
        trajectories=[trajectory for one in selections for trajectory in one.trajectories],
        advantages=np.concatenate([np.zeros(0, np.float32), *(one.advantages for one in selections)]),
        zero_variance=np.concatenate([np.zeros(0, np.bool_), *(one.zero_variance for one in selections)]),
        num_groups=sum(one.num_groups for one in selections),
        num_zero_variance=sum(one.num_zero_variance for one in selections),
        turn_advantages=[advantages for own in by_turn for advantages in own] if by_turn else None,
    )


def deal(selection: Selection, num_updates: int) -> list[list[int]]:
    """Indices of each update's trajectories; fewer updates if there are fewer groups.

    Groups are dealt in turn, zero-variance groups last: each update has its share of both kinds.
    """
    groups = groups_of([t.group_id for t in selection.trajectories])
    updates: list[list[int]] = [[] for _ in range(min(num_updates, len(groups)))]
    for number, members in enumerate(sorted(groups.values(), key=lambda own: bool(selection.zero_variance[own].all()))):
        updates[number % len(updates)] += members
    return updates


def select(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    keeps: Callable[[list[Trajectory]], bool],
    *,
    step: int,
) -> Selection:
    """The trajectories that the updates consist of, with their advantages, in order.

    Args:
        keeps: the task's filters, called with each group of two or more scored trajectories; of one too, where a
            trajectory needs no others for its advantage.
        step: number of the step, from 1, which decides the stage of the run.

    Raises:
        ValueError: a trajectory lacks what the settings need (`check_credit`), or has a reward that is not finite.
    """
    scored = [t for t in trajectories if t.status is not Status.failed]
    members = groups_of([t.group_id for t in scored])
    smallest = 2 if needs_others(algorithm) else 1
    usable = {g for g, own in members.items() if len(own) < smallest or keeps([scored[i] for i in own])}
    scored = by_role([t for t in scored if t.group_id in usable], own_groups=algorithm.baseline_by_role)
    # A trajectory may be the only one of its prompt, and a role may have come to its turn in one trajectory alone.
    sizes = Counter(t.group_id for t in scored)
    scored = [t for t in scored if sizes[t.group_id] >= smallest]
    for trajectory in scored:
        check_credit(trajectory, algorithm)
    ids, weights = [t.group_id for t in scored], stage_weights(algorithm.credit, step)
    rewards = [mixed_reward(t.reward, t.turn_rewards, weights) for t in scored]
    if not np.isfinite(rewards).all():
        broken = [t.trajectory_id for t, reward in zip(scored, rewards, strict=True) if not np.isfinite(reward)]
        raise ValueError(f"rewards that are not finite: {', '.join(broken[:8])}")
    advantages = trajectory_advantages(scored, rewards, algorithm)
    by_turn = turn_advantages(scored, advantages, algorithm, weights) if algorithm.credit.by_turn else None
    zero_variance = _zero_variance_ids(ids, rewards, advantages, by_turn, algorithm)
    chosen = [
        index
        for index, trajectory in enumerate(scored)
        if trajectory.num_sampled_tokens
        and not (algorithm.truncated is TruncationMode.mask and trajectory.status is not Status.completed)
    ]
    chosen = best_and_worst(chosen, rewards, scored, algorithm.selection)
    if not _compares(algorithm):
        advantages = np.ones_like(advantages)
    return Selection(
        trajectories=[scored[i] for i in chosen],
        advantages=advantages[chosen],
        zero_variance=np.array(
            [_compares(algorithm) and scored[i].group_id in zero_variance for i in chosen], np.bool_
        ),
        num_groups=len(set(ids)),
        num_zero_variance=len(zero_variance),
        turn_advantages=None if by_turn is None else [by_turn[i].astype(np.float32) for i in chosen],
    )


def needs_others(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage of a trajectory rests on others of its group."""
    return _compares(algorithm) and algorithm.advantage in COMPARING


def _compares(algorithm: AlgorithmConfig) -> bool:
    return algorithm.selection.mode is not SelectionMode.best


def check_credit(trajectory: Trajectory, algorithm: AlgorithmConfig) -> None:
    """Raises ValueError if the trajectory lacks an advantage or states that the settings need; says which."""
    credit = algorithm.credit.name
    if algorithm.advantage == AdvantageName.given:
        if credit is CreditName.turn and len(trajectory.turn_advantages) != trajectory.num_turns:
            raise ValueError(
                f"{trajectory.trajectory_id} has no turn_advantages, which algorithm.advantage given needs"
            )
        if credit is not CreditName.turn and trajectory.advantage is None:
            raise ValueError(f"{trajectory.trajectory_id} has no advantage: algorithm.advantage given needs one")
    elif credit is CreditName.gigpo and len(trajectory.turn_states) != trajectory.num_turns:
        raise ValueError(f"{trajectory.trajectory_id} has no turn_states: algorithm.credit.name gigpo needs them")


def trajectory_advantages(
    trajectories: Sequence[Trajectory], rewards_N: Sequence[float], algorithm: AlgorithmConfig
) -> np.ndarray:
    """Advantage of each trajectory, float32 [N]; a placeholder of 0 where the selection needs none."""
    if not _compares(algorithm):
        return np.zeros(len(trajectories), np.float32)
    if algorithm.advantage != AdvantageName.given:
        return group_advantages(
            rewards_N, [t.group_id for t in trajectories], algorithm.advantage, trajectories=trajectories
        )
    if algorithm.credit.name is CreditName.turn:
        return np.array([np.mean(t.turn_advantages or [0.0]) for t in trajectories], np.float32)
    return np.array([t.advantage for t in trajectories], np.float32)


def turn_advantages(
    trajectories: Sequence[Trajectory],
    advantages_N: np.ndarray,
    algorithm: AlgorithmConfig,
    weights: tuple[float, float],
) -> list[np.ndarray]:
    """Advantages of each trajectory's turns, float64 [turns].

    Args:
        advantages_N: of the trajectories.
        weights: of process and outcome rewards.
    """
    credit, kind = algorithm.credit, algorithm.advantage
    ids = [t.group_id for t in trajectories]
    returns = [
        turn_returns(t.reward, t.turn_rewards, t.num_turns, weights=weights, discount=credit.discount)
        for t in trajectories
    ]
    if credit.name is CreditName.gigpo:
        states = [t.turn_states for t in trajectories]
        found = gigpo_advantages(returns, states, ids, kind, advantages_N, credit.step_weight)
    elif credit.name is CreditName.trajectory:
        found = [np.full(len(own), value, np.float64) for own, value in zip(returns, advantages_N, strict=True)]
    elif kind == AdvantageName.given:
        found = [np.array(t.turn_advantages, np.float64) for t in trajectories]
    else:
        found = advantages_by_turn(returns, ids, kind, advantages_N)
    return weighted(found, credit.turn_weights)


def best_and_worst(
    indices: Sequence[int], rewards_N: Sequence[float], trajectories: Sequence[Trajectory], settings: SelectionConfig
) -> list[int]:
    """The trajectories of `indices` that the selection keeps, in order; of equal rewards the trajectory ids decide."""
    if settings.mode is SelectionMode.all:
        return list(indices)
    kept: set[int] = set()
    for own in groups_of([trajectories[i].group_id for i in indices]).values():
        ranked = sorted((indices[i] for i in own), key=lambda i: (-rewards_N[i], trajectories[i].trajectory_id))
        best = ranked[: settings.count]
        if settings.mode is SelectionMode.best:
            kept.update(i for i in best if rewards_N[i] >= settings.min_reward)
        else:
            kept.update(best, ranked[-settings.count :])
    return [i for i in indices if i in kept]


def zero_variance_groups(rewards_N: Sequence[float], group_ids_N: Sequence[str]) -> set[str]:
    """Groups whose rewards are all equal up to rounding, so that every advantage is 0."""
    rewards = np.asarray(rewards_N, np.float64)
    return {
        group_id
        for group_id, members in groups_of(group_ids_N).items()
        if len(members) > 1 and are_equal(rewards[members])
    }


def _zero_variance_ids(
    ids: Sequence[str],
    rewards_N: Sequence[float],
    advantages_N: np.ndarray,
    by_turn_N: Sequence[np.ndarray] | None,
    algorithm: AlgorithmConfig,
) -> set[str]:
    """Groups whose advantages are all 0."""
    if by_turn_N is not None:
        largest_N = [float(np.abs(own).max(initial=0.0)) for own in by_turn_N]
    elif algorithm.advantage not in COMPARING:
        largest_N = np.abs(advantages_N).tolist()
    else:
        return zero_variance_groups(rewards_N, ids)
    return {group for group, own in groups_of(ids).items() if max(largest_N[i] for i in own) <= ROUNDING}
