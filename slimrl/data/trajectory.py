"""The types that every stage speaks: Prompt, Segment, Trajectory, and the trajectory file format.

A trajectory file is JSONL, one object per trajectory, keys as the fields below, arrays as lists;
`slimrl rollout --out FILE` writes it and `slimrl train --trajectories FILE` reads it.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np


class Status(str, Enum):
    completed = "completed"
    truncated = "truncated"
    """Ran out of tokens or turns."""
    aborted = "aborted"
    """Stopped by us, for example by its deadline."""
    failed = "failed"
    """An engine, tool or environment broke; never trained on."""


@dataclass(kw_only=True)
class Prompt:
    """One line of a prompt file."""

    prompt_id: str
    """`<file stem>:<line number>`, or the line's own `id`."""
    messages: list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Segment:
    """One contiguous context: prompt, sampled tokens and tool results, T tokens in order."""

    tokens: np.ndarray
    """int32 [T]"""
    loss_mask: np.ndarray
    """bool [T], true exactly on tokens that the policy sampled"""
    rollout_logprobs: np.ndarray
    """float32 [T], the engine's natural-log probability; 0 where the policy did not sample"""
    weight_versions: np.ndarray
    """int32 [T], version that sampled the token; -1 where the policy did not sample"""
    turn_ids: np.ndarray
    """int16 [T], 0-based assistant turn of a token; a tool result bears the turn that called it, the prompt -1"""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, topk]; -1 where the engine reports none"""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("loss_mask", "rollout_logprobs", "weight_versions", "turn_ids", "routed_experts"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise ValueError(f"segment: {name} has {len(value)} entries, tokens has {length}")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, eq=False)
class Trajectory:
    group_id: str
    """The prompt that it came from; advantages are grouped by this and by nothing else."""
    trajectory_id: str
    segments: list[Segment]
    status: Status
    reward: float = float("nan")
    """NaN until scored."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation as text, for rewards and for people; training reads the segments alone."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`num_turns`, `num_tool_calls`, `num_tool_errors`, `error` and whatever a task adds."""

    @property
    def num_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(segment.loss_mask.sum()) for segment in self.segments)


_DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "weight_versions": np.int32,
    "turn_ids": np.int16,
    "routed_experts": np.int16,
}


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    segments = [
        {name: None if (value := getattr(segment, name)) is None else value.tolist() for name in _DTYPES}
        for segment in trajectory.segments
    ]
    return {**vars(trajectory), "status": trajectory.status.value, "segments": segments}


def from_json(value: dict[str, Any]) -> Trajectory:
    """Raises ValueError or KeyError or TypeError for an object that is no trajectory."""
    segments = [Segment(**_arrays(segment)) for segment in value["segments"]]
    return Trajectory(**{**value, "status": Status(value["status"]), "segments": segments})


def _arrays(segment: dict[str, Any]) -> dict[str, Any]:
    optional = "routed_experts"
    return {
        name: None if name == optional and segment[name] is None else np.asarray(segment[name], dtype)
        for name, dtype in _DTYPES.items()
    }


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    with path.open("w") as file:
        for trajectory in trajectories:
            file.write(json.dumps(to_json(trajectory)) + "\n")


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Raises ValueError naming file and line for a line that is no trajectory."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                yield from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a trajectory: {error!r}") from error
