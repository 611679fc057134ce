"""Items of an evaluation: one is a finished trajectory, as a line of items.jsonl and in all figures of an
evaluation."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from slimrl.base.visible import visible
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory

type Key = tuple[str, str, int]
"""Set, id of the prompt, and number of the sample from 0."""


@dataclass(frozen=True, kw_only=True)
class Item:
    set: str
    prompt_id: str
    sample: int
    status: Status
    reward: float
    """Reward of the trajectory; 0 if it failed."""
    rewards: dict[str, float]
    """Values of the reward's named parts, if it has any."""
    num_turns: int
    num_sampled_tokens: int
    turn_tokens: list[int]
    """Number of sampled tokens of each turn."""
    tool_calls: dict[str, dict[str, int]]
    """`calls`, `errors` and `malformed` of each tool that was called."""
    error: str | None
    """Cause of a trajectory that failed or was aborted; None for others."""
    messages: list[dict[str, Any]]

    @property
    def key(self) -> Key:
        return self.set, self.prompt_id, self.sample

    @property
    def broke(self) -> bool:
        """Whether the trajectory failed or was aborted, so that another attempt may end otherwise."""
        return self.status in (Status.failed, Status.aborted)


def item_of(trajectory: Trajectory, key: Key) -> Item:
    """The item of a scored trajectory."""
    failed = trajectory.status is Status.failed
    set_name, prompt_id, sample = key
    return Item(
        set=set_name,
        prompt_id=prompt_id,
        sample=sample,
        status=trajectory.status,
        reward=0.0 if failed else float(trajectory.reward),
        rewards={} if failed else {name: float(part) for name, part in trajectory.rewards.items()},
        num_turns=trajectory.num_turns,
        # What a search sampled besides its path is spent as well.
        num_sampled_tokens=trajectory.metadata.get("search", {}).get("num_tokens", trajectory.num_sampled_tokens),
        turn_tokens=[
            sum(int((segment.loss_mask & (segment.turn_ids == turn)).sum()) for segment in trajectory.segments)
            for turn in range(trajectory.num_turns)
        ],
        tool_calls=trajectory.metadata.get("tool_calls", {}),
        error=trajectory.metadata.get("error"),
        messages=trajectory.messages,
    )


def item_keys(set_name: str, prompts: Sequence[Prompt], samples_per_prompt: int) -> list[Key]:
    """Keys of all items of a set, ordered by prompt and sample."""
    return [(set_name, prompt.prompt_id, sample) for prompt in prompts for sample in range(samples_per_prompt)]


def to_line(item: Item) -> str:
    """JSON with the line's end."""
    return visible(json.dumps({**asdict(item), "status": item.status.value}, ensure_ascii=False, default=str)) + "\n"


def from_line(line: bytes) -> Item:
    """Raises ValueError for a line that is not an item; says why."""
    value = json.loads(line.decode())
    names = {field.name for field in fields(Item)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"must be an object with the keys {', '.join(sorted(names))}")
    if not isinstance(value["reward"], int | float) or not math.isfinite(value["reward"]):
        raise ValueError("`reward` must be a finite number")
    return Item(**{**value, "status": Status(value["status"])})


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write a file for readers; makes the folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(to_line, items)))
