"""Checkpoints in the memory of the nodes that have ranks (`checkpoint.in_memory_every_steps`).

1. They are like those on the disk, with checksums, in a folder of /dev/shm of each node (cluster/memory_nodes.py). The
   driver's has the state of the run. Since only this layout loads them, no rank gathers the optimizer's states.
2. The newest one is kept, and beside it the one before, until each file of the newest is on two nodes. Only then is
   the next one begun.
3. A copy that cannot be made or loaded, for example for want of room, does not end the run: it goes on with the one
   before, or with a checkpoint on the disk.
4. The folders are removed with the run, by a janitor if the run is killed.
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
from slimrl.runtime.checks.checkpoint_check import check_checkpoint
from slimrl.runtime.cluster.memory_nodes import MemoryNodes
from slimrl.runtime.cluster.node_memory import COPIES, Fetched, check_room, files_in
from slimrl.runtime.cluster.placement import Node
from slimrl.runtime.state import CheckpointFolder, RunState, read_state

GIB = 1024**3

log = logging.getLogger(__name__)


class StillCopying(NotWritten):
    """The last copy is not on two nodes yet, so that no other is begun."""


class MemoryFolder(CheckpointFolder):
    """The folder of a run's checkpoints in memory, removed at the end of the `with` block."""

    def __init__(self, say: Callable[[str], None], timeout_s: float, needed: int) -> None:
        """
        Args:
            say: tells the user that a copy could not be made or used.
            timeout_s: deadline of copies between nodes.
            needed: bytes that the first copy takes on this node at least.
        """
        self._made = meeting_folder(COPIES)
        super().__init__(Path(self._made.name))
        watch_over(self.path)
        self.nodes = MemoryNodes(self.path, timeout_s)
        self._say = say
        self._needed = needed
        """Bytes of the newest copy on this node"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self._made.cleanup()

    def on(self, node: Node, folder: Path) -> Path:
        """The absolute path of a folder on a node; folders elsewhere are on a disk that nodes share."""
        if not folder.is_relative_to(self.path):
            return folder.absolute()
        return self.nodes.on(node) / folder.relative_to(self.path)

    def is_of_one_layout(self, folder: Path) -> bool:
        return folder.is_relative_to(self.path)

    def fetched(self, node: Node, folder: Path) -> Fetched | None:
        """What brings the files of a part of `newest_after` to a node; None if they are there or on a disk."""
        return self.nodes.fetched(node, folder.relative_to(self.path)) if folder.is_relative_to(self.path) else None

    @contextmanager
    def naming_failures(self, step: int) -> Iterator[None]:
        """Where the copy of this step cannot be written, that is said, and no part of it is left."""
        try:
            yield
        except StillCopying as error:
            log.info("no copy of step %d in memory: %s", step, error)
        except (OSError, NotWritten) as error:
            free = f"{shutil.disk_usage(self.path).free / GIB:.1f} GiB of {self.path.parent} are free"
            self.clean()
            text = f"the copy of step {step} in memory could not be made: {error}; on the driver's node {free}"
            log.warning("%s", text)
            self._say(f"warning: {text}")

    def begin(self, step: int) -> Path:
        """As of a folder on the disk.

        Raises:
            StillCopying: files of the last copy are still on the way to a second node.
            NotWritten: a node does not answer, or has no room.
            OSError: this node has not so much room as the last copy took, or as the first takes at least.
        """
        for path in self.complete()[-1:]:
            if self.nodes.is_copying(path.name):
                raise StillCopying(f"{path.name} is not on two nodes yet")
            if not self.nodes.is_copied(path.name):
                self._say(f"warning: {path.name} in memory would not survive the loss of a node: it is not copied")
        self.prune(1)
        partial = super().begin(step)
        check_room(self.path, self._needed)
        self.nodes.make(partial.name)
        return partial

    def finish(self, partial: Path, state: RunState, files: Mapping[str, FileDigest]) -> Path:
        own = files_in(partial, ".")
        self._needed = sum((partial / name).stat().st_size for name in own)
        # The driver's folder last: without it there is no checkpoint.
        of_nodes = self.nodes.rename(partial.name, self.named(state.step).name, own)
        final = super().finish(partial, state, files)
        self.nodes.copy(final.name, of_nodes)
        return final

    def prune(self, keep: int, every_steps: int = 0) -> None:
        """Remove all but the newest `keep`, and the newest `keep` of which each file is on two nodes."""
        paths = self.complete()
        copied = [path for path in paths if self.nodes.is_copied(path.name)]
        for path in paths:
            if path not in (*paths[-keep:], *copied[-keep:]):
                self.remove(path)
        self._keep_alike()

    def clean(self) -> None:
        super().clean()
        self._keep_alike()

    def forget_after(self, step: int) -> None:
        """Remove copies of later steps, behind which the run has gone back."""
        for path, of_step in zip(self.complete(), self.steps(), strict=True):
            if of_step > step:
                self.remove(path)
        self._keep_alike()

    def forget(self, checkpoint: Path) -> bool:
        """Remove a copy; False if the checkpoint is elsewhere, or cannot be removed."""
        if not checkpoint.is_relative_to(self.path):
            return False
        self.remove(checkpoint)
        self._keep_alike()
        return not checkpoint.exists()

    def newest_after(self, step: int) -> tuple[Path, RunState] | None:
        """The newest whole copy of a later step, and its state; says which newer ones are not whole."""
        later = [path for path, of_step in zip(self.complete(), self.steps(), strict=True) if of_step > step]
        for path in reversed(later):
            try:
                return path, self._state_of(path)
            except ValueError as error:
                log.warning("%s", error)
                self._say(f"warning: the copy of {path.name} in memory is not whole and is not used")
        return None

    def _state_of(self, path: Path) -> RunState:
        """Raises ValueError: files are missing or damaged."""
        if not self.nodes.are_several:
            return check_checkpoint(path, contents=True).state
        state, files = read_state(path)
        if missing := self.nodes.look_up(path.name, files or {}):
            raise ValueError(f"{path.name}: no node has {', '.join(missing)}")
        return state

    def _keep_alike(self) -> None:
        """Have the other nodes keep what this one has."""
        self.nodes.keep([path.name for path in self.path.iterdir()])


def newest_copy(
    memory: MemoryFolder | None, run: RunFolder, say: Callable[[str], None]
) -> tuple[Path, RunState] | None:
    """The newest copy in memory and its state, if it is newer than the newest checkpoint on the disk."""
    on_disk = max(CheckpointFolder(run.checkpoints).steps(), default=0)
    if memory is None or (found := memory.newest_after(on_disk)) is None:
        return None
    say(f"continuing after step {found[1].step}, from the copy in memory")
    return found
