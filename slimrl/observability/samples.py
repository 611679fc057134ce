"""Readable samples: a few trajectories of each step as conversations, without token arrays."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.base.visible import visible
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory


def readable(trajectory: Trajectory) -> dict[str, Any]:
    """Conversation, reward and counts of a trajectory as JSON values."""
    return {
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "status": trajectory.status.value,
        "reward": trajectory.reward if math.isfinite(trajectory.reward) else None,
        "rewards": trajectory.rewards,
        "turn_rewards": trajectory.turn_rewards,
        **({"role_rewards": trajectory.role_rewards} if trajectory.role_rewards else {}),
        "num_tokens": trajectory.num_tokens,
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "messages": trajectory.messages,
        "metadata": trajectory.metadata,
    }


def write_samples(path: Path, trajectories: Iterable[Trajectory], prompts: Mapping[str, Prompt], limit: int) -> None:
    """Write the first trajectory of each of the first `limit` groups and its prompt's label, one JSON object per line;
    makes the folder. What an environment showed of its states becomes files in a folder beside it, which `images` names
    by the number of the turn that follows.

    Args:
        prompts: the groups' prompts, by their ids.
    """
    _write(
        path,
        [
            readable(one) | {"label": prompts[one.group_id].label} | _write_images(path.with_suffix(""), number, one)
            for number, one in enumerate(first_of_groups(trajectories, limit))
        ],
    )


def first_of_groups(trajectories: Iterable[Trajectory], limit: int) -> list[Trajectory]:
    """The first trajectory of each of the first `limit` groups."""
    chosen: dict[str, Trajectory] = {}
    for trajectory in trajectories:
        if len(chosen) < limit:
            chosen.setdefault(trajectory.group_id, trajectory)
    return list(chosen.values())


def as_markdown(trajectory: Trajectory) -> str:
    """The conversation for a tracker's page: what is said stands as code, so that nothing in it is markup."""
    parts = [f"reward {trajectory.reward:g}, {trajectory.status.value}"]
    for message in trajectory.messages:
        said = {name: value for name, value in message.items() if name != "role" and value}
        text = said["content"] if list(said) == ["content"] else json.dumps(said, ensure_ascii=False, default=str)
        lines = visible(str(text)).splitlines()
        parts.append("\n".join([f"**{message['role']}**", "", *(f"    {line}" for line in lines)]))
    return "\n\n".join(parts)


def write_failed(path: Path, failed: Sequence[Trajectory], limit: int) -> None:
    """Write at most `limit` trajectories that failed, in the same form; one of each cause before further ones."""
    first: dict[str, Trajectory] = {}
    for trajectory in failed:
        first.setdefault(str(trajectory.metadata.get("error")), trajectory)
    of_causes = list(first.values())
    chosen = [*of_causes, *(one for one in failed if one not in of_causes)][:limit]
    _write(path, map(readable, chosen))


def _write_images(folder: Path, line: int, trajectory: Trajectory) -> dict[str, Any]:
    names = {}
    for turn, image in sorted(trajectory.images.items()):
        file = folder / f"{line}_{turn}.png"
        folder.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)
        names[turn] = f"{folder.name}/{file.name}"
    return {"images": names} if names else {}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(visible(line) + "\n" for line in lines))
