"""Writes what a run records of its steps, in a thread of its own, and keeps its files within a number of bytes.

When the files have become larger than the bound, every second recorded step is left out from then on and its files are
removed; then three of four, and so on. So what is kept is spread over the whole run.
"""

import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from slimrl.observability.recorded_trajectories import Recorded, write_recorded
from slimrl.observability.units import show_bytes

_OF_STEP = re.compile(r"(?:step|eval)_(\d+)(?:_.*)?\.parquet")

log = logging.getLogger(__name__)


class RecordWriter:
    """Writes one file after the other; at most one waits."""

    def __init__(
        self,
        folder: Path,
        decode: Callable[[Sequence[int]], str],
        *,
        most_bytes: int,
        keep_through_step: int,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Remove files that a run left of steps that it makes again.

        Args:
            folder: of the files, which are `step_<step>.parquet` and `eval_<step>_<set>.parquet`.
            decode: text of tokens.
            most_bytes: of all files together.
            keep_through_step: the step at which the run continues; 0 for a new run.
            say: shows the user a line.
        """
        self._folder, self._decode, self._most_bytes, self._say = folder, decode, most_bytes, say
        self.every_steps = 1
        """Steps whose number this divides are recorded."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slimrl-record")
        self._writing: Future[None] | None = None
        for path, step in self._files():
            if step > keep_through_step:
                path.unlink()

    def write(self, path: Path, recorded: Recorded) -> None:
        """Begin to write a file; waits for the one before.

        Raises:
            OSError: that one could not be written; names it.
        """
        self.flush()
        if recorded.values.trajectories and recorded.step % self.every_steps == 0:
            self._writing = self._pool.submit(partial(self._write, path, recorded))

    def flush(self) -> None:
        """Wait for the last file; raises as `write`."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, path: Path, recorded: Recorded) -> None:
        write_recorded(path, recorded, self._decode)
        sizes = {file: (step, file.stat().st_size) for file, step in self._files()}
        while sum(size for _, size in sizes.values()) > self._most_bytes and self.every_steps <= recorded.step:
            self.every_steps *= 2
            self._say(
                f"recorded trajectories are larger than tracking.recorded_bytes, {show_bytes(self._most_bytes)}: from "
                f"now on one step in {self.every_steps} is kept"
            )
            for file in [file for file, (step, _) in sizes.items() if step % self.every_steps]:
                file.unlink()
                del sizes[file]

    def _files(self) -> list[tuple[Path, int]]:
        """Files with their steps."""
        found = ((path, _OF_STEP.fullmatch(path.name)) for path in sorted(self._folder.glob("*.parquet")))
        return [(path, int(name[1])) for path, name in found if name]
