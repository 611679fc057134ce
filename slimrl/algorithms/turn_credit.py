"""Advantages by turn within groups of trajectories (docs/algorithms.md#credit-over-turns).

N trajectories, trajectory n with K_n turns; values by turn are one float64 array [K_n] for each trajectory.
A comparison takes the estimator of the group's advantages: `grpo`, `dr_grpo` or `rloo`.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from slimrl.algorithms.advantages import group_advantages, groups_of
from slimrl.config.schema.credit import CreditConfig


def stage_weights(credit: CreditConfig, step: int) -> tuple[float, float]:
    """Weights of process and outcome rewards at a step from 1 on (progressive shaping, arXiv:2512.07478)."""
    stage = sum(start <= step for start in credit.stage_starts)
    return credit.process_weights[stage], credit.outcome_weights[stage]


def mixed_reward(outcome: float, turn_rewards: Sequence[float], weights: tuple[float, float]) -> float:
    """Reward of a trajectory: weights[1] times the outcome plus weights[0] times the sum of its turns' rewards."""
    process, final = weights
    return final * outcome + process * math.fsum(turn_rewards)


def turn_returns(
    outcome: float, turn_rewards: Sequence[float], num_turns: int, *, weights: tuple[float, float], discount: float
) -> np.ndarray:
    """Discounted rewards from each turn on, float64 [K]: G_k = sum over j >= k of discount^(j - k) r_j.

    r_j is the weighted reward of turn j; the last turn's has the weighted outcome too.

    Args:
        turn_rewards: K numbers, or none.
        weights: of process and outcome.
    """
    process, final = weights
    returns = np.zeros(num_turns, np.float64)
    returns[: len(turn_rewards)] = np.multiply(process, turn_rewards, dtype=np.float64)
    if num_turns:
        returns[-1] += final * outcome
    for turn in range(num_turns - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def advantages_by_turn(
    returns_N: Sequence[np.ndarray], group_ids_N: Sequence[str], kind: str, alone_N: np.ndarray
) -> list[np.ndarray]:
    """Advantage of each turn's return among those of the same turn number in the group.

    Args:
        kind: see the module.
        alone_N: advantages of the trajectories, for turns that no other trajectory of the group reached.
    """
    keys = [
        [(group_id, turn) for turn in range(len(own))] for group_id, own in zip(group_ids_N, returns_N, strict=True)
    ]
    alone = [np.full(len(own), value) for own, value in zip(returns_N, alone_N, strict=True)]
    return compared(returns_N, keys, kind, alone)


def gigpo_advantages(
    returns_N: Sequence[np.ndarray],
    states_N: Sequence[Sequence[str]],
    group_ids_N: Sequence[str],
    kind: str,
    trajectory_advantages_N: np.ndarray,
    step_weight: float,
) -> list[np.ndarray]:
    """A_trajectory + step_weight * A_step (GiGPO, arXiv:2505.10978, eq. 8).

    A_step compares the returns of all turns of the group's trajectories that start from the same state (eq. 6 and 7);
    it is 0 for a turn whose state occurs once.
    """
    keys = [[(group_id, state) for state in own] for group_id, own in zip(group_ids_N, states_N, strict=True)]
    steps = compared(returns_N, keys, kind, [np.zeros(len(own)) for own in returns_N])
    return [value + step_weight * own for value, own in zip(trajectory_advantages_N, steps, strict=True)]


def compared(
    values_N: Sequence[np.ndarray], keys_N: Sequence[Sequence[Hashable]], kind: str, alone_N: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Advantage of each value among those with the same key; that of `alone_N` where a key occurs once."""
    values = np.concatenate([np.zeros(0), *values_N])
    advantages = np.concatenate([np.zeros(0), *alone_N])
    names: dict[Hashable, str] = {}
    ids = [names.setdefault(key, str(len(names))) for own in keys_N for key in own]
    assert len(ids) == len(values) == len(advantages), "one key and one fallback for each value"
    shared = [index for own in groups_of(ids).values() if len(own) > 1 for index in own]
    advantages[shared] = group_advantages(values[shared].tolist(), [ids[index] for index in shared], kind)
    ends = np.cumsum([len(own) for own in values_N])
    return np.split(advantages, ends[:-1]) if len(ends) else []


def weighted(advantages_N: Sequence[np.ndarray], turn_weights: Sequence[float]) -> list[np.ndarray]:
    """Advantages times the weight of their turn; turns beyond the weights have the last one's."""
    if not turn_weights:
        return list(advantages_N)
    weights = np.asarray(turn_weights, np.float64)
    return [own * weights[np.minimum(np.arange(len(own)), len(weights) - 1)] for own in advantages_N]
