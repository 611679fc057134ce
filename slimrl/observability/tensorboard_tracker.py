"""TensorBoard's event files of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


class TensorboardTracker:
    """See Tracker."""

    def __init__(self, folder: Path, config: Mapping[str, Any], keep_through_step: int | None) -> None:
        """
        Args:
            folder: of the event files; an attempt that continues a run adds one.
            keep_through_step: step at which the run continues, of which TensorBoard hides later ones; None for a new
                run.
        """
        settings = yaml.safe_dump(dict(config), allow_unicode=True)
        self._folder, self._settings = folder, "".join(f"    {line}\n" for line in settings.splitlines())
        self._open(keep_through_step)

    def _open(self, keep_through_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = None if keep_through_step is None else keep_through_step + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=purged)
        self._writer.add_text("config", self._settings, purged or 0)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def log_texts(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            self._writer.add_text(f"trajectories/{number}", text, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()
