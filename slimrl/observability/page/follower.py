"""The contents of a page while its runs go on, with a version that grows when they change.

Nothing is done unless it is asked: the files' times and sizes are compared, and only if one has changed the contents
are made again. Trajectories of files that stayed the same are kept, so a step costs what its own files take. Runs
that change faster than their contents are made cost at most a fifth of a core.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from slimrl.base.folder_lock import holder_of
from slimrl.observability.page.conversations import Known
from slimrl.observability.page.document import Contents, page_contents
from slimrl.observability.run_folder import RunFolder

REST = 4.0
"""Time between two makings of the contents, in units of what the last one took"""

Stamp = tuple[str, int, int]
"""Path, time of change in ns and size of a file"""


class Follower:
    """Threads may use it at once."""

    def __init__(self, folders: Sequence[Path], title: str, most: int) -> None:
        """Read the runs for the first time; arguments and errors are those of `page_contents`."""
        self._folders, self._title, self._most = list(folders), title, most
        self._known: Known = {}
        self._lock = threading.Lock()
        self._version, self._rests_until = 0, 0.0
        self._stamps: list[Stamp] = []
        self._contents: Contents
        self.newest()

    def newest(self) -> tuple[int, Contents]:
        """The version, from 1, and the contents, made again if a file has changed.

        Raises:
            ValueError: a file cannot be read, such as one that is being written; names it.
            OSError: the same, or it is gone.
        """
        with self._lock:
            stamps = _stamps(self._folders)
            if stamps != self._stamps and time.monotonic() >= self._rests_until:
                begin = time.monotonic()
                self._contents = page_contents(self._folders, self._title, self._most, self._known)
                # Those from before: what was written meanwhile is read again.
                self._stamps, self._version = stamps, self._version + 1
                end = time.monotonic()
                self._rests_until = end + REST * (end - begin)
            return self._version, self._contents

    def part(self, name: str) -> str | None:
        """A packed part of the contents; None if they have none of that name now."""
        return self._contents.parts.get(name)


def _stamps(folders: Sequence[Path]) -> list[Stamp]:
    stamps = []
    for run in map(RunFolder, folders):
        single = (run.config, run.resumed_config, run.provenance, run.metrics, run.requeue, run.ended_early)
        files = [*single, run.log_file("driver")]
        for folder in (run.trajectories, run.expert_load, run.profile):
            files += sorted(folder.glob("*"))
        for path in files:
            if path.exists():
                stat = path.stat()
                stamps.append((str(path), stat.st_mtime_ns, stat.st_size))
        # A killed run changes no file, but leaves its lock.
        stamps.append((f"{run.path}: {holder_of(run.path)}", 0, 0))
    return stamps
