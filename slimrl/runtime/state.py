"""What a run needs, beside the trainer's own checkpoint, to continue exactly: a small JSON file in each checkpoint.

A checkpoint is the folder `checkpoints/step_000010` with `trainer/` (Megatron's sharded checkpoint) and `state.json`.
It is written under a hidden name and renamed when complete, so that whatever has the final name is complete.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_STEP = "step_{:06d}"
_PARTIAL = ".partial_"


@dataclass(kw_only=True)
class RunState:
    """State between two steps of a run."""

    step: int = 0
    """Steps completed."""
    weight_version: int = 0
    """Version that the engines serve."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Position in the training data."""
    skipped_steps: int = 0
    """Optimizer updates skipped so far for a gradient that was not finite."""
    skipped_in_a_row: int = 0
    unwritten: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step while they wait for its evaluation; empty once its line is written."""


class CheckpointFolder:
    """The `checkpoints/` folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> Path:
        """A fresh hidden folder to write the checkpoint of `step` into."""
        partial = self.path / (_PARTIAL + _STEP.format(step))
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return partial

    def finish(self, partial: Path, state: RunState, keep: int) -> Path:
        """Adds the state, gives the folder its final name and removes all but the newest `keep` checkpoints."""
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        final = self.path / partial.name.removeprefix(_PARTIAL)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        for old in self.complete()[:-keep]:
            shutil.rmtree(old)
        return final

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is complete."""
        return (self.path / _STEP.format(step)).is_dir()

    def complete(self) -> list[Path]:
        """Complete checkpoints, the oldest first."""
        return sorted(self.path.glob(_STEP.format(0).rstrip("0") + "*"))

    def latest(self) -> tuple[Path, RunState] | None:
        """The newest complete checkpoint, or None where there is none yet."""
        found = self.complete()
        if not found:
            return None
        return found[-1], RunState(**json.loads((found[-1] / "state.json").read_text()))
