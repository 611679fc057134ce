"""Checkpoints in the memory of the machine (`checkpoint.in_memory_every_steps`), for a trainer that is started anew.

1. They are checkpoints like those on the disk, with the same files and checksums, in a folder of /dev/shm. The newest
   one is kept, and until it is whole the one before.
2. A copy that cannot be made, for example for want of room, does not end the run: it goes on with the one before.
3. The folder is removed with the run, by a janitor if the run is killed.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from slimrl.base.errors import NotWritten
from slimrl.base.folder_janitor import watch_over
from slimrl.base.meeting_folder import meeting_folder
from slimrl.checkpoints.digests import FileDigest
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.checks.checkpoint_check import WholeCheckpoint, check_checkpoint
from slimrl.runtime.state import CheckpointFolder, RunState

GIB = 1024**3

log = logging.getLogger(__name__)


class MemoryFolder(CheckpointFolder):
    """The folder of a run's checkpoints in memory, removed at the end of the `with` block."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: tells the user that a copy could not be made or used.
        """
        self._made = meeting_folder("checkpoints")
        super().__init__(Path(self._made.name))
        watch_over(self.path)
        self._say = say
        self._needed = 0
        """Bytes of the newest copy"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self._made.cleanup()

    @contextmanager
    def naming_failures(self, step: int) -> Iterator[None]:
        """Where the copy of this step cannot be written, that is said, and no part of it is left."""
        try:
            yield
        except (OSError, NotWritten) as error:
            free = f"{shutil.disk_usage(self.path).free / GIB:.1f} GiB of {self.path.parent} are free"
            self.clean()
            log.warning("copy of step %d: %s; %s", step, error, free)
            self._say(f"warning: the copy of step {step} in memory could not be made: {error}; {free}")

    def begin(self, step: int) -> Path:
        """As of a folder on the disk. Raises OSError if there is not so much room as the last copy took."""
        partial = super().begin(step)
        if shutil.disk_usage(self.path).free < self._needed:
            raise OSError(f"it takes {self._needed / GIB:.1f} GiB")
        return partial

    def finish(self, partial: Path, state: RunState, files: Mapping[str, FileDigest]) -> Path:
        self._needed = sum(digest.bytes for digest in files.values())
        return super().finish(partial, state, files)

    def newest(self) -> WholeCheckpoint | None:
        """The newest whole copy; says which newer ones are not whole."""
        for path in reversed(self.complete()):
            try:
                return check_checkpoint(path, contents=True)
            except ValueError as error:
                log.warning("%s", error)
                self._say(f"warning: the copy of {path.name} in memory is not whole and is not used")
        return None

    def forget_after(self, step: int) -> None:
        """Remove copies of later steps, behind which the run has gone back."""
        for path, of_step in zip(self.complete(), self.steps(), strict=True):
            if of_step > step:
                self.remove(path)


def newest_copy(
    memory: MemoryFolder | None, run: RunFolder, say: Callable[[str], None]
) -> tuple[Path, RunState] | None:
    """The newest copy in memory and its state, if it is newer than the newest checkpoint on the disk."""
    on_disk = CheckpointFolder(run.checkpoints).steps()
    if memory is None or (found := memory.newest()) is None or found.state.step <= max(on_disk, default=0):
        return None
    say(f"continuing after step {found.state.step}, from the copy in memory")
    return found.path, found.state
