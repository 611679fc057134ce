"""Trajectories with their tokens as Parquet, one row each: what a run records of its steps (docs/data_formats.md)."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.base.atomic import atomic_file
from slimrl.data.parquet import read_parquet
from slimrl.data.token_values import TOKEN_VALUES, TokenValues
from slimrl.data.trajectory import Segment, Trajectory

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character"""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is written of one step or of one evaluation set."""

    step: int
    values: TokenValues
    """The trajectories, and what the updates found at their tokens"""
    sources: Mapping[str, str]
    """Name of the file that a prompt is from, or of the evaluation set, by the prompt's id"""
    labels: Mapping[str, Any]
    """The prompts' labels, by their ids"""
    advantages: Mapping[str, float]
    """Advantages of the trajectories that the updates consist of, by their ids"""


def write_recorded(path: Path, recorded: Recorded, decode: Callable[[Sequence[int]], str]) -> None:
    """Write a whole file, which replaces one that is there; makes the folder.

    Args:
        decode: text of tokens.

    Raises:
        OSError: the file could not be written; names it.
    """
    import pyarrow
    import pyarrow.parquet

    rows = [_row(trajectory, recorded, decode) for trajectory in recorded.values.trajectories]
    fields = _fields()
    columns = {
        name: pyarrow.array([row[name] for row in rows], kind, from_pandas=True) for name, kind in fields.items()
    }
    path.parent.mkdir(exist_ok=True)
    with atomic_file(path) as stream:
        pyarrow.parquet.write_table(pyarrow.table(columns, pyarrow.schema(list(fields.items()))), stream)


def read_recorded(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, with JSON columns and rewards as Python values; a segment lacks its lists that are null.

    Raises:
        ValueError: the file is missing or no such file.
    """

    def parse(row: dict[str, Any], number: int) -> dict[str, Any]:
        if missing := {"messages", "metadata", "segments"} - row.keys():
            raise ValueError(f"no recorded trajectory: it has no {', '.join(sorted(missing))}")
        texts = {name: json.loads(row[name]) for name in ("label", "messages", "metadata")}
        return row | texts | {name: dict(row[name]) for name in ("rewards", "role_rewards")}

    return read_parquet(path, parse)


def token_texts(tokens_T: np.ndarray, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token. A character of several tokens is the first one's, and the others' texts are empty."""
    ids, places_T = np.unique(tokens_T, return_inverse=True)
    of_ids = [decode([token]) for token in ids.tolist()]
    texts = [of_ids[place] for place in places_T.tolist()]
    start = 0
    while start < len(texts):
        end = start
        while end < len(texts) and BROKEN in texts[end]:
            end += 1
        if end > start + 1:
            texts[start:end] = [decode(tokens_T[start:end].tolist()), *[""] * (end - start - 1)]
        start = end + 1
    return texts


def _fields() -> dict[str, Any]:
    """Types of the columns by name."""
    import pyarrow as pa

    text, number, parts = pa.string(), pa.float64(), pa.map_(pa.string(), pa.float64())
    values = {name: pa.list_(pa.bool_() if name == "clipped" else pa.float32()) for name in TOKEN_VALUES}
    segment = {
        "role": text,
        "tokens": pa.list_(pa.int32()),
        "texts": pa.list_(text),
        "loss_mask": pa.list_(pa.bool_()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "weight_versions": pa.list_(pa.int32()),
        "turn_ids": pa.list_(pa.int16()),
        "teacher_logprobs": pa.list_(pa.float32()),
        **values,
    }
    return {
        "step": pa.int32(),
        "data_source": text,
        "group_id": text,
        "trajectory_id": text,
        "status": text,
        "reward": number,
        "rewards": parts,
        "role_rewards": parts,
        "turn_rewards": pa.list_(number),
        "advantage": number,
        "num_turns": pa.int32(),
        "num_tokens": pa.int32(),
        "num_sampled_tokens": pa.int32(),
        "label": text,
        "messages": text,
        "metadata": text,
        "segments": pa.list_(pa.struct(list(segment.items()))),
    }


def _row(trajectory: Trajectory, recorded: Recorded, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "step": recorded.step,
        "data_source": recorded.sources.get(trajectory.group_id),
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "status": trajectory.status.value,
        "reward": trajectory.reward if math.isfinite(trajectory.reward) else None,
        "rewards": list(trajectory.rewards.items()),
        "role_rewards": list(trajectory.role_rewards.items()),
        "turn_rewards": trajectory.turn_rewards,
        "advantage": recorded.advantages.get(trajectory.trajectory_id),
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "label": _json(recorded.labels.get(trajectory.group_id)),
        "messages": _json(trajectory.messages),
        "metadata": _json(trajectory.metadata),
        "segments": [_segment(segment, recorded.values.of(segment), decode) for segment in trajectory.segments],
    }


def _segment(
    segment: Segment, values: Mapping[str, np.ndarray], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    arrays = {
        name: getattr(segment, name)
        for name in ("tokens", "loss_mask", "rollout_logprobs", "weight_versions", "turn_ids", "teacher_logprobs")
    }
    found: dict[str, Any] = {name: values.get(name) for name in TOKEN_VALUES}
    if (clipped_T := found["clipped"]) is not None:
        found["clipped"] = [None if math.isnan(value) else bool(value) for value in clipped_T.tolist()]
    return {"role": segment.role, "texts": token_texts(segment.tokens, decode), **arrays, **found}


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def whole_groups(trajectories: Iterable[Trajectory], limit: int) -> list[Trajectory]:
    """The trajectories of the first groups: as many whole groups as are within the limit, and at least one.

    Args:
        limit: number of trajectories; 0 for none, -1 for all.
    """
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    chosen: list[Trajectory] = []
    for members in groups.values():
        fits = limit < 0 or len(chosen) + len(members) <= limit
        if limit == 0 or (chosen and not fits):
            break
        chosen += members
    return chosen
