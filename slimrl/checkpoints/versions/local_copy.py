"""An engine's own copy of the weights, from which it reloads each version.

The engine has one folder on each of its nodes, for all its processes there. Engines do not share one: an engine that
hangs while it loads would keep the others from the next version.

- `checkpoint/`: a Hugging Face checkpoint.
- `state.json`: its version, and whether it is clean. It is marked as not clean before the first byte changes, and as
  clean with the new version after the last tensor was checked.
- `lock`: held exclusively while the copy changes, and shared while processes load it. The kernel releases it when a
  process ends.

A copy starts again from a whole version if it is not clean, if its version is not on the chain to the next one, or if
the machine was rebooted since (bytes that were not yet on the disk may be lost).
"""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slimrl.base.atomic import write_whole
from slimrl.checkpoints.versions.apply import apply_delta, copy_whole
from slimrl.checkpoints.versions.directory import VersionDirectory
from slimrl.checkpoints.versions.manifest import Manifest, VersionRef, read_manifest

POLL_S = 0.02
"""Seconds between two attempts to take a lock that another process holds."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalCopy:
    """The copy in the folder `path`, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._checkpoint = path / "checkpoint"
        self._state_file = path / "state.json"

    @contextmanager
    def at(self, target: Path, timeout_s: float) -> Iterator[Path]:
        """Bring the copy to the version in the folder `target`; it does not change during the block.

        The first process does the work; the others wait for it.

        Yields:
            The checkpoint folder.

        Raises:
            ValueError: the version, or one that it builds on, is missing, damaged or another writing.
            OSError: the disk is full, or reading or writing failed.
            TimeoutError: other processes held the lock for `timeout_s`.
        """
        manifest = read_manifest(target)
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(error.errno, f"resync.local_dir: {error.strerror}", str(self._path)) from error
        deadline = time.monotonic() + timeout_s
        with (self._path / "lock").open("ab") as lock:
            while not (_try_lock(lock, fcntl.LOCK_SH) and self.version() == manifest.ref):
                if _try_lock(lock, fcntl.LOCK_EX):
                    if self.version() != manifest.ref:
                        self._bring_to(manifest, VersionDirectory(target.parent))
                elif time.monotonic() > deadline:
                    have = self.version()
                    raise TimeoutError(
                        f"{self._path}: no lock for {manifest.ref} within {timeout_s:g} s; "
                        f"other processes load {have or 'it'}"
                    )
                else:
                    time.sleep(POLL_S)
            yield self._checkpoint

    def version(self) -> VersionRef | None:
        """The version that the copy holds; None if there is none, or it is not reliable."""
        try:
            state = json.loads(self._state_file.read_text())
            if state["clean"] and state["boot"] == _boot_id() and self._checkpoint.is_dir():
                return VersionRef(version=state["version"], id=state["id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            # Never written, or truncated.
            return None
        return None

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
            # The copy is of no use any more, and the next attempt may need its room on a full disk.
            shutil.rmtree(self._checkpoint, ignore_errors=True)
            raise

    def _set_state(self, ref: VersionRef, *, clean: bool) -> None:
        state = {"version": ref.version, "id": ref.id, "clean": clean, "boot": _boot_id()}
        write_whole(self._state_file, json.dumps(state))


def _try_lock(lock: BinaryIO, kind: int) -> bool:
    """Take the lock, or change its kind, without waiting; after a failure no lock is held."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return False
    return True


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()
