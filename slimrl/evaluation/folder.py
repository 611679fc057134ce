"""Files of an evaluation's folder, `slimrl eval --out DIR`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EvalFolder:
    path: Path

    @property
    def record(self) -> Path:
        """File that says what the evaluation is of."""
        return self.path / "evaluation.json"

    @property
    def items(self) -> Path:
        """File with one line for each finished trajectory."""
        return self.path / "items.jsonl"

    @property
    def summary(self) -> Path:
        """File of the results; there when the evaluation is complete."""
        return self.path / "summary.json"
