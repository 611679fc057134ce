"""Advantages of trajectories within their groups: GRPO, Dr. GRPO, RLOO. Groups follow the group id, never position."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group."""


def group_advantages(rewards_N: Sequence[float], group_ids_N: Sequence[str], kind: str) -> np.ndarray:
    """Advantage of each trajectory within its group, float32 [N].

    Args:
        rewards_N: finite rewards.
        group_ids_N: the group of each.
        kind: `grpo` (r - mean) / (std + 1e-6) with the unbiased std (arXiv:2402.03300); `dr_grpo` r - mean
            (arXiv:2503.20783); `rloo` r minus the mean of the others (arXiv:2402.14740).

    Raises:
        ValueError: an unknown kind, a reward that is not finite, or a group of one.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"unknown advantage {kind!r}")
    rewards = np.asarray(rewards_N, np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards that are not finite at {np.flatnonzero(~np.isfinite(rewards)).tolist()[:8]}")
    advantages = np.zeros(len(rewards), np.float64)
    for group_id, members in groups_of(group_ids_N).items():
        if len(members) == 1:
            raise ValueError(f"group {group_id!r} has one trajectory, so there is no baseline")
        own = rewards[members]
        centred = own - own.mean()
        if kind == "grpo":
            centred = np.zeros_like(own) if np.ptp(own) == 0 else centred / (own.std(ddof=1) + STD_EPSILON)
        elif kind == "rloo":
            centred = centred * len(own) / (len(own) - 1)
        advantages[members] = centred
    return advantages.astype(np.float32)


def groups_of(group_ids_N: Sequence[str]) -> dict[str, list[int]]:
    """Indices of the members of each group, in order of first appearance."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, group_id in enumerate(group_ids_N):
        groups[group_id].append(index)
    return dict(groups)
