"""What became of every group of an asynchronous run that was ended by SIGUSR1, from the files that it left.

1. `groups.jsonl` has the groups that left up to the last step; the checkpoint those that left since, wait or run.
2. Each group that began stands in one of them, once, and the counts are admission's own.
3. Each step took its batch, of groups that are not too old.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

LOST = ("filtered", "failed", "dropped")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    lines: Sequence[Mapping[str, Any]]
    """Lines of the groups that left up to the last step"""
    left: Sequence[Mapping[str, Any]]
    """The same of those that left since"""
    present: Sequence[int]
    """Numbers of groups that waited or ran at the end"""
    admission: Mapping[str, Any]
    """Its state at the end"""
    metrics: Sequence[Mapping[str, Any]]
    """Metrics of each step"""

    @classmethod
    def read(cls, folder: RunFolder) -> "Ledger":
        saved = max(path for path in folder.checkpoints.iterdir() if path.name.startswith("step_")) / "rollout"
        state = json.loads((saved / "admission.json").read_text())
        return cls(
            lines=_read_lines(folder.groups),
            left=state["left"],
            present=[group["number"] for group in _read_lines(saved / "groups.jsonl")],
            admission=state["admission"],
            metrics=[line for line in read_metrics(folder.metrics) if line["step"] > 0],
        )

    @property
    def ends(self) -> Counter[str]:
        """How many groups left in which way."""
        return Counter(line["end"] for line in (*self.lines, *self.left))

    def problems(self, *, batch: int, max_staleness: int) -> list[str]:
        """What is wrong; empty for a sound run.

        Args:
            batch: groups of a step.
        """
        found = []
        numbers = [line["group"] for line in (*self.lines, *self.left)] + list(self.present)
        begun = self.admission["begun"]
        if twice := [number for number, times in Counter(numbers).items() if times > 1]:
            found.append(f"groups that stand there twice: {twice}")
        if lost := set(range(begun)) - set(numbers):
            found.append(f"groups that are nowhere: {sorted(lost)}")
        if dict(self.ends) != {end: count for end, count in self.admission["ended"].items() if count}:
            found.append(f"ends {dict(self.ends)}, admission says {self.admission['ended']}")
        still = [number for name in ("running", "waiting") for number, _ in self.admission[name]]
        if sorted(still) != sorted(self.present):
            found.append(f"groups {sorted(self.present)} were saved, admission has {sorted(still)}")
        taken = [line for line in self.lines if line["end"] == "taken"]
        steps = [line["step"] for line in self.metrics]
        if steps != list(range(1, len(steps) + 1)) or Counter(line["step"] for line in taken) != dict.fromkeys(
            steps, batch
        ):
            found.append(f"steps {steps} did not take {batch} groups each")
        for line in taken:
            ages = [line["step"] - 1 - update for update in line["updates"]]
            if max(ages, default=0) > max_staleness:
                found.append(f"group {line['group']} was trained on at the ages {ages}")
        for end in LOST:
            counted = sum(line[f"async/{end}_groups"] for line in self.metrics)
            if counted != (written := sum(line["end"] == end for line in self.lines)):
                found.append(f"metrics count {counted} {end} groups, the ledger has {written}")
        return found


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
