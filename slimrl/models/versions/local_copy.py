"""An engine's own copy of the weights, brought from version to version, from which it reloads.

One folder on every node of the engine, whatever the number of its processes there. Engines do not share one: an engine
that hangs while it loads would keep the others from the next version.

- `checkpoint/`: a Hugging Face checkpoint.
- `state.json`: its version, and whether it is clean. It is marked as not clean before the first byte changes, and clean
  with the new version after the last one was checked.
- `lock`: held alone while the copy changes, and together while processes load it. The kernel releases it when a process
  ends, however that ends.

A copy that is not clean, of a version off the way to the next one, or of another life of the machine (what was not yet
on its disk may be lost) starts from a whole version.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slimrl.models.versions.apply import apply_delta, copy_whole
from slimrl.models.versions.directory import VersionDirectory
from slimrl.models.versions.manifest import Manifest, VersionRef, read_manifest
from slimrl.models.whole_file import whole_file

POLL_S = 0.02
"""Between two looks at a lock that others hold."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalCopy:
    """The copy in the folder `path`, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checkpoint = path / "checkpoint"
        self._state_file = path / "state.json"

    @contextmanager
    def at(self, target: Path, timeout_s: float) -> Iterator[Path]:
        """Bring the copy to the version in the folder `target`; it stays as it is during the block.

        Whichever process comes first does the work; the others wait and find it done.

        Yields:
            The checkpoint folder.

        Raises:
            ValueError: the version, or one that it builds on, is missing, damaged or not what it should be.
            OSError: the disk is full, or reading or writing failed.
            TimeoutError: others held the lock for `timeout_s`.
        """
        manifest = read_manifest(target)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(self._path)) from error
        deadline = time.monotonic() + timeout_s
        with (self._path / "lock").open("ab") as lock:
            while not self._held_at(manifest.ref, lock):
                if _try_lock(lock, fcntl.LOCK_EX):
                    if self.version() != manifest.ref:
                        self._bring_to(manifest, VersionDirectory(target.parent))
                elif time.monotonic() > deadline:
                    have = self.version()
                    raise TimeoutError(
                        f"{self._path}: for {timeout_s:g} s others load {have or 'it'}, {manifest.ref} is due"
                    )
                else:
                    time.sleep(POLL_S)
            yield self._checkpoint

    def version(self) -> VersionRef | None:
        """What the copy holds; None where it holds no version, or none that can be relied on."""
        try:
            state = json.loads(self._state_file.read_text())
            if state["clean"] and state["boot"] == _boot_id() and self._checkpoint.is_dir():
                return VersionRef(version=state["version"], id=state["id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Never written, or cut off in the middle of it: then there is no such version.
            return None
        return None

    def _held_at(self, ref: VersionRef, lock: BinaryIO) -> bool:
        """Whether the lock is held together with others and the copy is at the version."""
        return _try_lock(lock, fcntl.LOCK_SH) and self.version() == ref

    def _bring_to(self, target: Manifest, directory: VersionDirectory) -> None:
        chain = directory.chain(target, self.version())
        self._set_state(target.ref, clean=False)
        try:
            for manifest in chain:
                source = directory.folder(manifest.ref.version)
                if manifest.base is None:
                    shutil.rmtree(self._checkpoint, ignore_errors=True)
                    copy_whole(source, manifest, self._checkpoint)
                else:
                    apply_delta(source, manifest, self._checkpoint)
            self._set_state(target.ref, clean=True)
        except OSError:
            # Not clean, so of no use any more, and what it takes of a full disk is in the way of the next attempt.
            shutil.rmtree(self._checkpoint, ignore_errors=True)
            raise

    def _set_state(self, ref: VersionRef, *, clean: bool) -> None:
        state = {"version": ref.version, "id": ref.id, "clean": clean, "boot": _boot_id()}
        with whole_file(self._state_file) as file:
            file.write(json.dumps(state).encode())


def _try_lock(lock: BinaryIO, kind: int) -> bool:
    """Take the lock, or exchange the one that is held for it, without waiting; after a failure none is held."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    return True


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
