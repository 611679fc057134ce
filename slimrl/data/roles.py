"""Episodes of several roles: one trajectory for the ledger, and for the algorithm one of each role that is trained.

The conversation of a role is all that it was told and said. Its trajectory has its segments, its reward, and the group
of the same role of the same prompt, so that baselines, ratios of sequences and credit are a role's own
(role-conditioned advantage, SPIRAL, arXiv:2506.24119). Roles to which the environment gave a group, such as those that
solve what another role of the episode has asked, have a group of their own in each episode.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from slimrl.data.trajectory import PROMPT_ID, Segment, Status, Trajectory

ROLE_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Names of roles, which are a part of groups' ids and of metrics' names"""
ROLE_NAME_RULE = "letters, digits, '.', '_' and '-', 64 at most"


def trained_roles(trajectory: Trajectory) -> list[str]:
    """The roles that are trained; none in an episode without roles."""
    return [role for role, facts in trajectory.metadata.get("roles", {}).items() if facts["train"]]


def by_role(trajectories: Sequence[Trajectory], *, own_groups: bool = True) -> list[Trajectory]:
    """The trajectories of the algorithm, in order: those with roles become one of each role that is trained.

    Args:
        own_groups: whether each role has groups of its own; otherwise the roles of a prompt share one, but for those
            to which the environment gave a group.
    """
    return [part for trajectory in trajectories for part in _parts(trajectory, own_groups)]


def outcome(trajectory: Trajectory, own: Collection[str], others: Collection[str]) -> float | None:
    """What some roles made of a game against others, by what the environment paid: 1 if it paid them more on average,
    0.5 if as much, or if nobody was paid, and 0 if less; None if the trajectory failed or was aborted."""
    if trajectory.status in (Status.failed, Status.aborted):
        return None
    paid = trajectory.metadata["environment"].get("role_rewards", {})
    won, lost = (fmean(paid.get(role, 0.0) for role in roles) for roles in (own, others))
    return 0.5 if won == lost else float(won > lost)


def _parts(trajectory: Trajectory, own_groups: bool) -> list[Trajectory]:
    if "roles" not in trajectory.metadata:
        return [trajectory]
    return [_of_role(trajectory, role, own_groups) for role in trained_roles(trajectory)]


def _of_role(trajectory: Trajectory, role: str, own_group: bool) -> Trajectory:
    group = trajectory.metadata["roles"][role].get("group", "")
    shared = f"{trajectory.group_id} {role}" if own_group else trajectory.group_id
    segments = [segment for segment in trajectory.segments if segment.role == role]
    turns = sorted({int(turn) for segment in segments for turn in np.unique(segment.turn_ids[segment.loss_mask])})

    def chosen[V](values: Sequence[V]) -> list[V]:
        return [values[turn] for turn in turns] if values else []

    return replace(
        trajectory,
        group_id=f"{trajectory.trajectory_id} {group}" if group else shared,
        trajectory_id=f"{trajectory.trajectory_id} {role}",
        segments=[replace(segment, turn_ids=_renumbered(segment, turns)) for segment in segments],
        reward=trajectory.role_rewards[role],
        turn_rewards=chosen(trajectory.turn_rewards),
        turn_states=chosen(trajectory.turn_states),
        turn_advantages=chosen(trajectory.turn_advantages),
        scratch={**trajectory.scratch, PROMPT_ID: trajectory.group_id},
        metadata={key: value for key, value in trajectory.metadata.items() if key != "roles"}
        | {"num_turns": len(turns)},
    )


def _renumbered(segment: Segment, turns: Sequence[int]) -> np.ndarray:
    """int16 [T], turns of the role from 0; a token that answers a turn of the role has its number."""
    places = np.searchsorted(turns, segment.turn_ids, side="right") - 1
    return np.where(segment.turn_ids < 0, -1, places).astype(np.int16)
