"""Checkpoints that are written beside the training.

`begin` copies what is to be saved, and the run goes on. The checkpoint is complete, and has its name, at the next
`look` after its files are written, or at `finish`, which waits for them. At any moment it is whole or not there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Protocol

from slimrl.base.errors import NotWritten
from slimrl.checkpoints.digests import FileDigest
from slimrl.config.schema.run import CheckpointConfig
from slimrl.runtime.state import CheckpointFolder, RunState


class CheckpointPart(Protocol):
    """Writes a folder of a checkpoint."""

    def begin_checkpoint(self, directory: Path) -> None:
        """Begin to write a folder that does not exist yet; later changes are not in it."""

    def has_written(self, directory: Path) -> bool:
        """Whether `finish_checkpoint` has nothing to wait for."""

    def finish_checkpoint(self, directory: Path) -> Mapping[str, FileDigest]:
        """Wait until it is complete; checksums of its files by their names."""


class WrittenAtOnce:
    """A part that is small."""

    def __init__(self, write: Callable[[Path], Mapping[str, FileDigest]]) -> None:
        """
        Args:
            write: writes the folder and returns the checksums of its files by name.
        """
        self._write = write

    def begin_checkpoint(self, directory: Path) -> None:
        self._digests = self._write(directory)

    def has_written(self, directory: Path) -> bool:
        return True

    def finish_checkpoint(self, directory: Path) -> Mapping[str, FileDigest]:
        return self._digests


class CheckpointWriter:
    """Writes at most one checkpoint at a time. Methods raise StageError as `CheckpointFolder.naming_failures`."""

    def __init__(self, folder: CheckpointFolder, settings: CheckpointConfig, completed: Callable[[int], None]) -> None:
        """
        Args:
            settings: which checkpoints are kept.
            completed: called with the step of each checkpoint that is complete.
        """
        self._folder, self._settings, self._completed = folder, settings, completed
        self._state: RunState | None = None
        """State of the checkpoint that is being written"""
        self._partial = Path()
        self._parts: dict[str, CheckpointPart] = {}

    @property
    def folder(self) -> Path:
        return self._folder.path

    @property
    def pending(self) -> RunState | None:
        """The state of the checkpoint that is being written."""
        return self._state

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of this step is complete or being written."""
        return self._folder.holds(step) or (self._state is not None and self._state.step == step)

    def begin(self, state: RunState, parts: Mapping[str, CheckpointPart]) -> None:
        """Begin a checkpoint, after the end of the one before.

        Args:
            parts: by the names of their folders.
        """
        self.finish()
        with self._naming_failures(state.step):
            self._partial = self._folder.begin(state.step)
            self._state, self._parts = deepcopy(state), {}
            for name, part in parts.items():
                try:
                    part.begin_checkpoint(self._partial / name)
                except (OSError, NotWritten):
                    with suppress(NotWritten):
                        self._finish_parts()
                    raise
                self._parts[name] = part

    def look(self) -> None:
        """Complete the checkpoint if its files are written."""
        if self._state is not None and all(
            part.has_written(self._partial / name) for name, part in self._parts.items()
        ):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is complete, if there is one."""
        if (state := self._state) is None:
            return
        with self._naming_failures(state.step):
            self._folder.finish(self._partial, state, self._finish_parts())
        if self._state is None:
            # The folder's own account of the failure is enough.
            return
        self._state = None
        self._folder.prune(self._settings.keep, self._settings.keep_every_steps)
        self._completed(state.step)

    def abandon(self) -> None:
        """Forget the checkpoint that is being written; its processes have ended."""
        self._state = None
        self._folder.clean()

    def _finish_parts(self) -> dict[str, FileDigest]:
        """Wait until all parts that were begun are written; checksums of their files by name.

        Raises:
            NotWritten: one could not be written. No other is still writing into the folder, which is removed then.
        """
        files: dict[str, FileDigest] = {}
        failure: NotWritten | None = None
        for name, part in self._parts.items():
            try:
                written = part.finish_checkpoint(self._partial / name)
                files |= {f"{name}/{file}": digest for file, digest in written.items()}
            except NotWritten as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return files

    @contextmanager
    def _naming_failures(self, step: int) -> Iterator[None]:
        with self._folder.naming_failures(step):
            try:
                yield
            except BaseException:
                self._state = None
                raise
