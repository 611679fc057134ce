"""A run's folder as it is now. Files are read again when they have changed."""

from pathlib import Path
from typing import Any

from slimrl.observability.metrics import read_metrics
from slimrl.observability.now_file import Now, read_now
from slimrl.observability.run_files import Run, read_run
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.run_state import state
from slimrl.observability.watch.answers import newest_samples


class View:
    def __init__(self, folder: Path) -> None:
        """
        Raises:
            ValueError: the folder holds no run.
        """
        self.folder = RunFolder(folder)
        if not self.folder.config.is_file():
            raise ValueError(f"{folder}: there is no run, which has a config.yaml. Name the folder of one: runs/NAME.")
        self._seen: list[Any] = []

    def refresh(self) -> None:
        """Read what has changed.

        Raises:
            ValueError: a file cannot be read; names it.
        """
        files = (self.folder.config, self.folder.resumed_config, self.folder.provenance, self.folder.metrics)
        if (seen := [_stamp(path) for path in files]) != self._seen:
            steps = read_metrics(self.folder.metrics) if self.folder.metrics.is_file() else []
            self.run: Run = read_run(self.folder.path, self.folder.path.name, steps)
            self._seen = seen
        self.now: Now | None = read_now(self.folder.now)
        self.state = state(self.run)
        self.source, self.samples = newest_samples(self.folder.trajectories)

    @property
    def is_running(self) -> bool:
        return self.state["word"] in ("starting", "running")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Changes with the file's content; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
