"""Files of checkpoints in the memory of a node, which other nodes copy: an actor on each node that has ranks.

A file has its name when it is whole. It is copied in pieces, so that neither node holds more of it twice, and once for
all ranks of a node that ask for it.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.base.folder_janitor import watch_over
from slimrl.base.meeting_folder import meeting_folder
from slimrl.checkpoints.digests import FileDigest, file_digests
from slimrl.config.env_vars import thread_variables
from slimrl.runtime.cluster.placement import Node

GIB = 1024**3
COPIES = "checkpoints"
"""Part of the names of the folders in /dev/shm"""
PIECE_BYTES = 64 * 1024**2
PIECE_S = 120.0
"""Deadline of a piece"""
PARTIAL = ".partial"
NUM_THREADS = 4
"""Files that a node copies at a time, and pieces that it gives"""


class NodeMemory:
    """The folder of one node. Names of files are relative to it."""

    def __init__(self, path: Path | None) -> None:
        """
        Args:
            path: the folder, where another process of the node has made it.
        """
        self._made: TemporaryDirectory[str] | None = None
        if path is None:
            self._made = meeting_folder(COPIES)
            path = Path(self._made.name)
            watch_over(path)
        self.path = path
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        self._fetched: set[str] = set()
        """Files that were copied to here"""
        self._needed = 0
        """Bytes that this node's ranks wrote of the newest checkpoint"""

    def folder(self) -> Path:
        return self.path

    def make(self, name: str) -> None:
        """Make a folder anew. Raises OSError: there is not so much room as its ranks took last."""
        check_room(self.path, self._needed)
        shutil.rmtree(self.path / name, ignore_errors=True)
        (self.path / name).mkdir()

    def rename(self, name: str, final: str) -> list[str]:
        """Give a folder its final name; names of the files in it."""
        shutil.rmtree(self.path / final, ignore_errors=True)
        self._forget([final])
        (self.path / name).rename(self.path / final)
        files = files_in(self.path, final)
        self._needed = sum((self.path / file).stat().st_size for file in files)
        return files

    def keep(self, folders: Sequence[str]) -> None:
        """Remove all folders but these."""
        for path in self.path.iterdir():
            if path.name not in folders:
                shutil.rmtree(path, ignore_errors=True)
        self.forget(folders)

    def forget(self, folders: Sequence[str]) -> None:
        """Forget the names of files in all folders but these."""
        self._forget({_folder_of(file) for file in [*self._locks, *self._fetched]} - {*folders})

    def digests(self, folder: str) -> dict[str, FileDigest]:
        """Sizes and checksums of the files of a folder. A file that is fetched after this is copied even if it is
        there, since it may be damaged."""
        self._forget([folder])
        return file_digests(self.path, files_in(self.path, folder))

    @ray.method(concurrency_group="pieces")  # type: ignore[untyped-decorator]
    def piece(self, name: str, start: int) -> bytes:
        with (self.path / name).open("rb") as file:
            return os.pread(file.fileno(), PIECE_BYTES, start)

    @ray.method(concurrency_group="files")  # type: ignore[untyped-decorator]
    def fetch(self, names: Sequence[str], source: Any) -> None:
        """Copy files from another node's actor, each once.

        Raises:
            OSError: there is no room.
            RayError: the other node is lost or late.
        """
        for name in names:
            with self._locks[name]:
                if name not in self._fetched or not (self.path / name).is_file():
                    self._copy(name, source)
                    self._fetched.add(name)

    def _copy(self, name: str, source: Any) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}{PARTIAL}")
        start = 0
        try:
            with partial.open("wb") as out:
                while piece := ray.get(source.piece.remote(name, start), timeout=PIECE_S):
                    out.write(piece)
                    start += len(piece)
        except BaseException:
            # It would keep others from the room.
            partial.unlink(missing_ok=True)
            raise
        partial.rename(file)

    def _forget(self, folders: Collection[str]) -> None:
        """Forget which files of these folders were copied."""
        # Threads that copy add to both.
        self._fetched.difference_update([file for file in [*self._fetched] if _folder_of(file) in folders])
        for file, lock in [*self._locks.items()]:
            if _folder_of(file) in folders and not lock.locked():
                del self._locks[file]


def check_room(path: Path, needed: int) -> None:
    """Raises OSError: fewer bytes are free where a folder is."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise OSError(f"it takes {needed / GIB:.1f} GiB of {path.parent}, and {free / GIB:.1f} are free")


def files_in(root: Path, folder: str) -> list[str]:
    """Names of the whole files of a folder, relative to `root`."""
    found = (path for path in (root / folder).rglob("*") if path.is_file() and not path.name.endswith(PARTIAL))
    return sorted(str(path.relative_to(root)) for path in found)


def _folder_of(file: str) -> str:
    return file.partition("/")[0]


_GROUPS = {"pieces": NUM_THREADS, "files": NUM_THREADS}
RemoteMemory = ray.remote(max_restarts=0, num_cpus=0, concurrency_groups=_GROUPS)(NodeMemory)  # type: ignore[call-overload]
"""NodeMemory as Ray starts it in a process of its own"""


@dataclass(frozen=True)
class Fetched:
    """Brings files of a checkpoint's part to a rank's node before it reads them. Ranks get it by Ray."""

    actor: Any
    """The node's own"""
    folder: str
    """The part, in the folder of a node"""
    sources: Mapping[str, Any]
    """Another node's actor that has the file, by the names in the part of files that are not on the node"""
    timeout_s: float

    @property
    def missing(self) -> Collection[str]:
        return self.sources.keys()

    def __call__(self, names: Collection[str]) -> None:
        """Raises OSError: a file could not be fetched."""
        asked = [self.actor.fetch.remote([f"{self.folder}/{name}"], self.sources[name]) for name in names]
        try:
            ray.get(asked, timeout=self.timeout_s)
        except RayError as error:
            raise OSError(f"files of {self.folder} were not copied to this node: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """What went wrong in an actor, and in those that it has asked itself, in a line."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def start_memory(node: Node, path: Path | None) -> Any:
    """The actor of a node, which takes none of its slots; see NodeMemory."""
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    variables = {"env_vars": thread_variables(1)}
    return RemoteMemory.options(scheduling_strategy=there, runtime_env=variables).remote(path)
