"""A run's folder as the page of runs and `slimrl watch` read it."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from slimrl.config.keys import flatten
from slimrl.config.schema.recipe import Recipe
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

DEFAULTS = dict(flatten(Recipe()))
"""Dotted key -> the schema's own value"""
MARKS = ("config.yaml", "metrics.jsonl")
"""Files by which a run's folder is known: one that is starting has the first, an old one may have the second alone"""


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    name: str
    """Name that differs from those of the runs it is shown with"""
    steps: list[dict[str, Any]]
    """Metrics of each step; empty as long as none has ended"""
    starts: list[dict[str, Any]]
    """Entries of provenance.json, one for each start; empty for a run that has none"""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> value, of the newest start."""
        nested = yaml.safe_load(self.folder.newest_config()) if self.folder.config.is_file() else {}
        return dict(_leaves(nested, ""))

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


def _leaves(value: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value and key not in DEFAULTS:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{key}.{name}".lstrip("."))]
    if isinstance(value, dict) and value:
        return [(f"{key}.{name}", inner) for name, inner in value.items()]
    return [(key, value)]


def read_runs(folders: list[Path]) -> list[Run]:
    """Read runs, each under the shortest name that tells it from the others.

    Raises:
        ValueError: a folder is none of a run or named twice, or its metrics.jsonl or provenance.json cannot be read.
    """
    paths = [folder.resolve() for folder in folders]
    if doubled := [str(path) for path in set(paths) if paths.count(path) > 1]:
        raise ValueError(f"{', '.join(doubled)}: named twice. Name each run once.")
    if missing := [str(path) for path in paths if not any((path / name).is_file() for name in MARKS)]:
        raise ValueError(f"{', '.join(missing)}: no folder of a run: it has neither {' nor '.join(MARKS)}.")
    return [
        read_run(path, name, read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").is_file() else [])
        for path, name in zip(paths, short_names(paths), strict=True)
    ]


def read_run(path: Path, name: str, steps: list[dict[str, Any]]) -> Run:
    """A run of which the metrics have been read. Raises ValueError: provenance.json cannot be read."""
    return Run(folder=RunFolder(path), name=name, steps=steps, starts=_starts(RunFolder(path).provenance))


def short_names(paths: list[Path]) -> list[str]:
    """The last parts of each path, at least two and as few as tell them apart: `seed_0/gspo` and `seed_1/gspo`."""
    longest = max(len(path.parts) for path in paths)
    for count in range(2, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _starts(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        starts: list[dict[str, Any]] = json.loads(path.read_text())
        return starts
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
