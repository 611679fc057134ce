"""Groups of trajectories that may outlive a step, and their file in a checkpoint."""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimrl.algorithms.selection import Selection
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Trajectory, from_json, to_json
from slimrl.rollout.group_ledger import ledger_line

GROUPS_FILE = "groups.jsonl"


@dataclass(kw_only=True)
class Group:
    """A prompt and its trajectories."""

    number: int
    prompt: Prompt
    ids: list[str]
    done: dict[str, Trajectory] = field(default_factory=dict)
    """Scored trajectories by their ids"""
    selection: Selection | None = None
    """What is trained on of the group, once it has ended"""
    stage_weights: tuple[float, ...] = ()
    """Weights of credit in the stage of the run for which `selection` was made"""
    begun: float = field(default_factory=time.time)
    """Unix time at which the group began"""
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    """Unix times at which a trajectory in `done` got its slot and was scored, by its id"""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.done[trajectory_id] for trajectory_id in self.ids]

    @property
    def left(self) -> list[str]:
        """The ids of trajectories that are not scored yet."""
        return [one for one in self.ids if one not in self.done]

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the group to its last scored trajectory."""
        return max([time_s - self.begun for time_s in self.ended.values()], default=0.0)

    def keep(self, trajectory: Trajectory) -> None:
        """Add a scored trajectory."""
        self.done[trajectory.trajectory_id] = trajectory
        self.started[trajectory.trajectory_id] = trajectory.measured[STARTED_AT]
        self.ended[trajectory.trajectory_id] = trajectory.measured[ENDED_AT]

    def line(self, end: str, updates: Iterable[int]) -> dict[str, Any]:
        """The group's line in groups.jsonl; see `ledger_line`."""
        return ledger_line(
            self.number,
            self.prompt.prompt_id,
            end,
            begun=self.begun,
            started=[self.started.get(one) for one in self.ids],
            ended=[self.ended.get(one) for one in self.ids],
            tokens=[self.done[one].num_sampled_tokens if one in self.done else None for one in self.ids],
            updates=updates,
        )

    def snapshot(self) -> "Group":
        """A copy of the group as it is now: later more trajectories are scored, and the rewards of groups are added."""
        done = {
            trajectory_id: replace(one, rewards=dict(one.rewards), metadata=dict(one.metadata))
            for trajectory_id, one in self.done.items()
        }
        return replace(self, done=done, started=dict(self.started), ended=dict(self.ended))


def write_groups(folder: Path, groups: Iterable[Group]) -> None:
    """A line for each. A trajectory at a time: thousands of them would hold up other threads for seconds."""
    with (folder / GROUPS_FILE).open("w") as file:
        for group in groups:
            values = {
                "number": group.number,
                "prompt_id": group.prompt.prompt_id,
                "ids": group.ids,
                "begun": group.begun,
                "started": group.started,
                "ended": group.ended,
            }
            done = ", ".join(json.dumps(to_json(trajectory)) for trajectory in group.done.values())
            file.write(f'{json.dumps(values)[:-1]}, "done": [{done}]}}\n')


def read_groups(folder: Path, prompts: Mapping[str, Prompt]) -> dict[int, Group]:
    """The groups in a folder, by their numbers.

    Args:
        prompts: of the training data, by their ids.

    Raises:
        ValueError: the prompt of a group is not among them.
    """
    groups = {}
    for line in (folder / GROUPS_FILE).read_text().splitlines():
        value = json.loads(line)
        prompt = prompts.get(value["prompt_id"])
        if prompt is None:
            raise ValueError(f"{folder}: prompt {value['prompt_id']} of a saved group is not in the data any more")
        done = [from_json(one) for one in value["done"]]
        groups[value["number"]] = Group(
            number=value["number"],
            prompt=prompt,
            ids=value["ids"],
            begun=value["begun"],
            started=value.get("started", {}),  # which older checkpoints lack
            ended=value["ended"],
            done={trajectory.trajectory_id: trajectory for trajectory in done},
        )
    return groups
