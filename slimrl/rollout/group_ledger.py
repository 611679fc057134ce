"""groups.jsonl of a run folder: what became of each group of trajectories, and when.

A group has a line once the step after it has its batch. The times are Unix times: a trajectory starts when it gets its
slot and ends when it is scored.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slimrl.base.atomic import write_whole


class GroupLedger:
    """Writes and reads groups.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, step: int) -> None:
        """Remove what a run that continues after a step writes again: the lines of later ones, and the broken last line
        that a killed process may leave."""
        if self._path.is_file():
            kept = [line for line in self._path.read_text().split("\n")[:-1] if json.loads(line)["step"] <= step]
            write_whole(self._path, "".join(f"{line}\n" for line in kept))

    def add(self, step: int, lines: Iterable[Mapping[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps({"step": step, **line}) + "\n" for line in lines)


def ledger_line(
    number: int,
    prompt_id: str,
    end: str,
    *,
    begun: float,
    started: Iterable[float | None],
    ended: Iterable[float | None],
    tokens: Iterable[int | None],
    updates: Iterable[int],
) -> dict[str, Any]:
    """
    Args:
        number: of the group, in the run; in the step if no group spans steps.
        end: `taken`, `filtered`, `failed` or `dropped`.
        started, ended, tokens: of each trajectory; None of those that had not ended.
        updates: those whose weights sampled the tokens.
    """
    return {
        "group": number,
        "prompt_id": prompt_id,
        "end": end,
        "begun": begun,
        "started": list(started),
        "ended": list(ended),
        "tokens": list(tokens),
        "updates": list(updates),
    }
