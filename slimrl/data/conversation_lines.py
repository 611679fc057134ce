"""Trajectories told as conversations, which `slimrl sft` learns from (docs/data_formats.md#conversations)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import write_lines
from slimrl.data.roles import trained_roles
from slimrl.data.trajectory import Status, Trajectory


def write_conversations(path: Path, trajectories: Iterable[Trajectory], min_reward: float) -> int:
    """Write those with a reward of at least `min_reward`, replacing a file that is there; returns their number."""
    return write_lines(path, conversation_lines(trajectories, min_reward))


def conversation_lines(trajectories: Iterable[Trajectory], min_reward: float) -> Iterator[dict[str, Any]]:
    """Each completed trajectory whose reward is at least `min_reward`; of one with several roles, each role that is
    trained and has such a reward."""
    for trajectory in trajectories:
        if trajectory.status is not Status.completed:
            continue
        roles = trained_roles(trajectory)
        for role in roles if "roles" in trajectory.metadata else ("",):
            reward = trajectory.role_rewards[role] if role else trajectory.reward
            if reward >= min_reward:
                name = f"{trajectory.trajectory_id} {role}".strip()
                yield {
                    "id": name,
                    "messages": [
                        _without_role(one) for one in trajectory.messages if one.get("conversation", "") == role
                    ],
                    **({"tools": trajectory.tools[role]} if role in trajectory.tools else {}),
                    "metadata": {"group_id": trajectory.group_id, "reward": reward},
                }


def _without_role(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "conversation"}
