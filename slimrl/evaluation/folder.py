"""Files of an evaluation's folder, `slimrl eval --out DIR`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EvalFolder:
    path: Path

    @property
    def record(self) -> Path:
        """What the evaluation is of."""
        return self.path / "evaluation.json"

    @property
    def items(self) -> Path:
        """One line for each finished trajectory."""
        return self.path / "items.jsonl"

    @property
    def summary(self) -> Path:
        """The results; there when the evaluation is complete."""
        return self.path / "summary.json"
