"""The trajectories of the page: a row of each for the table, and what is packed for reading it.

Of each step there are the recorded trajectories, which have tokens, and readable samples of others
(docs/recipes.md#the-folder-of-a-run). If the page may hold fewer than there are, each file gives whole groups from its
begin, the same number of trajectories each.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.base.jsonl import read_jsonl
from slimrl.observability.page.packed import compressed, quantity
from slimrl.observability.recorded_trajectories import read_recorded
from slimrl.observability.run_files import Run

_FILE = re.compile(r"(?:step|eval)_(\d+)(?:_(.+))?|failed")
QUANTITIES = {
    "rollout_logprobs": "log-prob of the engine",
    "advantages": "advantage",
    "ratios": "importance ratio",
    "entropies": "entropy",
    "teacher_logprobs": "log-prob of the teacher",
}
"""Values of tokens that are shown as they are recorded, and their titles"""
GAP = "trainer - engine"
"""Title of the difference of the two log-probs"""
MOST_IMAGE_BYTES = 400_000
"""Bytes of the images of one trajectory that are taken into the page"""


@dataclass
class Conversations:
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """One list for each column of the table; null where unknown"""
    parts: list[tuple[str, str]] = field(default_factory=list)
    """Packed conversation, and packed tokens (empty if they are not recorded), of each row; the column `part` has the
    name that the page gives both, which no other content has"""
    found: int = 0
    """Number of trajectories in the files that were read"""

    def add(self, row: dict[str, Any], parts: tuple[str, str]) -> None:
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)
        self.parts.append(parts)


@dataclass(frozen=True)
class _Taken:
    """What was taken from the files of one step or of one evaluation."""

    stamps: list[tuple[int, int]]
    """Time of change and size of each file"""
    limit: int
    found: int
    rows: list[tuple[dict[str, Any], tuple[str, str]]]
    """Row of the table, and packed parts, of each trajectory"""

    def serves(self, stamps: list[tuple[int, int]], limit: int) -> bool:
        return self.stamps == stamps and (limit <= self.limit or len(self.rows) == self.found)


Known = dict[tuple[Path, ...], _Taken]
"""What an earlier call took from files, which are not read again as long as they stay the same"""


def conversations(
    runs: Sequence[Run],
    most: int,
    known: Known | None = None,
    seen: Callable[[int, int], None] = lambda done, total: None,
) -> Conversations:
    """The trajectories of all runs, by run and step.

    Args:
        most: number of trajectories that the page holds.
        known: of an earlier call for the same runs; gets what this one takes in place of it.
        seen: called before each step with the numbers of those that are read, and of all.

    Raises:
        ValueError: a file cannot be read; names it.
    """
    earlier: Known = {} if known is None else dict(known)
    files = [
        (number, step, name, paths)
        for number, run in enumerate(runs)
        for (step, name), paths in sorted(_files(run.folder.trajectories).items())
    ]
    # Of more steps than the page may have trajectories, as many are read, spread over the run.
    files = [files[place] for place in np.linspace(0, len(files) - 1, min(len(files), most)).astype(int)]
    result, now = Conversations(), Known()
    for index, (number, step, name, paths) in enumerate(files):
        seen(index, len(files))
        # What earlier files have left is shared by those that follow.
        share = (most - len(result.parts)) // (len(files) - index)
        taken = now[tuple(paths)] = _take(paths, share, earlier.get(tuple(paths)))
        result.found += taken.found
        place = {"run": number, "step": step, "set": name}
        for row, parts in taken.rows:
            values = {**place, **row}
            result.add({**values, "part": _digest([*values.values(), *parts]), "has_tokens": parts[1] != ""}, parts)
    if known is not None:
        known.clear()
        known.update(now)
    return result


def _take(paths: Sequence[Path], limit: int, earlier: _Taken | None) -> _Taken:
    stamps = [(stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in paths)]
    if earlier is not None and earlier.serves(stamps, limit):
        kept = {row["id"] for row in _whole_groups([row for row, _ in earlier.rows], limit, "group")}
        return _Taken(stamps, limit, earlier.found, [one for one in earlier.rows if one[0]["id"] in kept])
    rows = _rows(paths)
    packed = [
        (_table_row(row), (compressed(_text_part(row, _images(row, paths[0].parent))), _token_part(row)))
        for row in _whole_groups(rows, limit, "group_id")
    ]
    return _Taken(stamps, limit, len(rows), packed)


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _files(folder: Path) -> dict[tuple[int, str], list[Path]]:
    """(step, set) -> its files. The set is empty in training; failed trajectories have the step -1."""
    found: dict[tuple[int, str], list[Path]] = {}
    for path in sorted(folder.glob("*")):
        name = _FILE.fullmatch(path.stem)
        if name is not None and path.suffix in (".jsonl", ".parquet"):
            key = (-1, "failed") if name[1] is None else (int(name[1]), name[2] or "")
            found.setdefault(key, []).append(path)
    return found


def _rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The trajectories of one step; a recorded one has the images of its readable sample."""
    readable: dict[str, dict[str, Any]] = {}
    recorded: dict[str, dict[str, Any]] = {}
    for path in paths:
        if path.suffix == ".parquet":
            recorded |= {row["trajectory_id"]: row for row in read_recorded(path)}
        else:
            rows = read_jsonl(
                path, lambda value, number: _of_evaluation(value) if "sample" in value else value, finite=False
            )
            readable |= {row["trajectory_id"]: row for row in rows}
    images = {key: {"images": row["images"]} for key, row in readable.items() if "images" in row}
    merged = {key: row | images.get(key, {}) for key, row in recorded.items()}
    if recorded and paths[0].stem.startswith("eval_"):
        # The samples are among them, under other ids.
        return list(merged.values())
    return [*merged.values(), *(row for key, row in readable.items() if key not in recorded)]


def _of_evaluation(item: dict[str, Any]) -> dict[str, Any]:
    """An evaluation's item (slimrl/evaluation/item.py) with the keys of a trajectory."""
    errors = sum(counts["errors"] for counts in item["tool_calls"].values())
    return {
        **item,
        "group_id": item["prompt_id"],
        "trajectory_id": f"{item['prompt_id']}/{item['sample']:03d}",
        "metadata": {"num_tool_errors": errors, "error": item["error"]},
    }


def _whole_groups(rows: list[dict[str, Any]], limit: int, key: str) -> Iterator[dict[str, Any]]:
    """The trajectories of the first groups, as many whole groups as the limit holds; at least one trajectory.

    Args:
        key: that of a row's group.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    left = max(limit, 1)
    for number, members in enumerate(groups.values()):
        if len(members) > left and number:
            return
        yield from members[:left]
        left -= len(members)
        if left <= 0:
            return


def _table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = row.get("metadata") or {}
    segments = row.get("segments", [])
    versions = [max(version for segment in segments for version in segment["weight_versions"])] if segments else []
    gaps = [gap for segment in segments if (gap := _gap(segment)) is not None]
    sizes_T = np.abs(np.concatenate(gaps)) if gaps else np.empty(0)
    known = bool(np.isfinite(sizes_T).any())
    return {
        "source": row.get("data_source"),
        "group": row["group_id"],
        "id": row["trajectory_id"],
        "status": row["status"],
        "reward": row.get("reward"),
        "advantage": row.get("advantage"),
        "turns": row.get("num_turns", metadata.get("num_turns")),
        "tokens": row.get("num_tokens"),
        "sampled": row.get("num_sampled_tokens"),
        "errors": metadata.get("num_tool_errors", 0),
        "version": versions[0] if versions and versions[0] >= 0 else None,
        "gap": float(np.nanmax(sizes_T)) if known else None,
    }


def _text_part(row: Mapping[str, Any], images: Mapping[str, str]) -> dict[str, Any]:
    names = ("messages", "metadata", "label", "rewards", "role_rewards", "turn_rewards")
    return {**{name: row[name] for name in names if row.get(name)}, **({"images": images} if images else {})}


def _images(row: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Base64 of the PNGs of a trajectory by the number of the turn that follows, as many as its share holds."""
    found: dict[str, str] = {}
    left = MOST_IMAGE_BYTES
    for turn, name in (row.get("images") or {}).items():
        file = folder / name
        if file.is_file() and (size := file.stat().st_size) <= left:
            found[str(turn)] = base64.b64encode(file.read_bytes()).decode()
            left -= size
    return found


def _token_part(row: Mapping[str, Any]) -> str:
    segments = [
        {
            "role": segment.get("role") or "",
            "ids": segment["tokens"],
            "texts": segment["texts"],
            "mask": [int(value) for value in segment["loss_mask"]],
            "versions": segment["weight_versions"],
            "turns": segment["turn_ids"],
            **({"clipped": _flags(segment["clipped"])} if segment.get("clipped") else {}),
            "quantities": _quantities(segment),
        }
        for segment in row.get("segments", [])
    ]
    return compressed(segments) if segments else ""


def _flags(values: Sequence[bool | None]) -> list[int]:
    return [int(bool(value)) for value in values]


def _quantities(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Packed numbers of the sampled tokens, by their titles."""
    mask_T = np.array(segment["loss_mask"], bool)
    found = {}
    for name, title in QUANTITIES.items():
        if segment.get(name):
            found[title] = quantity(np.where(mask_T, _array(segment[name]), np.nan))
    if (gap_T := _gap(segment)) is not None:
        found[GAP] = quantity(gap_T)
    return {title: packed for title, packed in found.items() if packed is not None}


def _gap(segment: Mapping[str, Any]) -> np.ndarray | None:
    """float64 [T], log-prob of the trainer minus that of the engine; NaN where one is unknown."""
    if not segment.get("trainer_logprobs"):
        return None
    gap_T = _array(segment["trainer_logprobs"]) - _array(segment["rollout_logprobs"])
    return np.where(np.array(segment["loss_mask"], bool), gap_T, np.nan)


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)
