"""The folder with the versions of one run, `v000012` each.

A version is written to `.v000012.partial` and renamed when it is whole. A folder to remove is renamed first, to
`.v000012.<random>.removed`, so `v000012` is always whole. A file that a process still reads may keep its folder on a
network file system for a while; then the next version tries again to remove it.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from slimrl.checkpoints.versions.manifest import Manifest, VersionRef, check_files, read_manifest

_NAME = re.compile(r"v(\d{6,})")
_UNFINISHED = re.compile(r"\.v\d{6,}\.(partial|[0-9a-f]{8}\.removed)")

log = logging.getLogger(__name__)


class VersionDirectory:
    """The folder with a run's versions; written by one process, read by any number."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def versions(self) -> list[int]:
        """Numbers of the whole versions in the folder, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.root.iterdir()) if self.root.is_dir() else ()
        return sorted(int(match.group(1)) for match in matches if match)

    def begin(self, version: int) -> Path:
        """A new folder to write the version into; removes what failed attempts left behind.

        Also removes later versions, which the run wrote before it was resumed from an earlier checkpoint.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.clean()
        for later in self.versions():
            if later > version:
                self._remove(self.folder(later))
        partial = self.root / f".{self.folder(version).name}.partial"
        partial.mkdir()
        return partial

    def clean(self) -> None:
        """Remove unfinished versions, and folders that could not be removed earlier."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    self._remove(path)

    def publish(self, partial: Path, version: int) -> Path:
        """Give a whole version its name, in place of an earlier writing of the same version."""
        folder = self.folder(version)
        sync_and_close(os.open(partial, os.O_RDONLY))
        replaced = self._set_aside(folder) if folder.exists() else None
        partial.rename(folder)
        sync_and_close(os.open(self.root, os.O_RDONLY))
        if replaced is not None:
            self._remove(replaced)
        return folder

    def has(self, ref: VersionRef) -> bool:
        """Whether exactly this writing of a version is there, with a readable manifest."""
        manifest = self._readable(ref.version)
        return manifest is not None and manifest.ref == ref

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` versions and those that these build on."""
        # Nobody can load a version with an unreadable manifest, so it needs no base.
        manifests = {version: self._readable(version) for version in self.versions()}
        bases = {version: found.base.version if found and found.base else None for version, found in manifests.items()}
        for version in superfluous(bases, keep):
            self._remove(self.folder(version))

    def chain(self, target: Manifest, have: VersionRef | None) -> list[Manifest]:
        """The versions to apply to `have` to get `target`, oldest first: deltas, or a whole version and deltas.

        Args:
            have: if None, or not on the chain to the target, the chain starts with a whole version.

        Raises:
            ValueError: a base is missing, is another writing of its version, or lacks a file or part of one.
        """
        chain: list[Manifest] = []
        manifest = target
        while manifest.ref != have:
            check_files(self.folder(manifest.ref.version), manifest)
            chain.append(manifest)
            if manifest.base is None or manifest.base == have:
                break
            manifest = self._base(manifest, manifest.base)
        return chain[::-1]

    def _set_aside(self, folder: Path) -> Path:
        """Rename a folder so that `clean` finds it."""
        version = folder.name.removeprefix(".").partition(".")[0]
        return folder.rename(self.root / f".{version}.{secrets.token_hex(4)}.removed")

    def _remove(self, folder: Path) -> None:
        """Rename and remove a folder; if that fails, the next version tries again."""
        if not folder.name.endswith(".removed"):
            folder = self._set_aside(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("%s could not be removed; the next version tries again: %s", folder, error)

    def _readable(self, version: int) -> Manifest | None:
        try:
            return read_manifest(self.folder(version))
        except ValueError:
            return None

    def _base(self, manifest: Manifest, base: VersionRef) -> Manifest:
        try:
            found = read_manifest(self.folder(base.version))
        except ValueError as error:
            raise ValueError(f"{manifest.ref} is a delta on {base}, which cannot be read: {error}") from error
        if found.ref != base:
            raise ValueError(f"{manifest.ref} is a delta on {base}, but {self.folder(base.version)} is {found.ref}")
        if base.version >= manifest.ref.version:
            raise ValueError(f"{manifest.ref} is a delta on {base}, which is not before it")
        return found


def superfluous(bases: Mapping[int, int | None], keep: int) -> list[int]:
    """Versions, ascending, that are neither among the newest `keep` nor a base of one of these.

    Args:
        bases: the version that each version builds on; None for a whole one.
    """
    needed: set[int] = set()
    for newest in sorted(bases)[-keep:]:
        version: int | None = newest
        while version is not None and version not in needed:
            needed.add(version)
            version = bases.get(version)
    return sorted(set(bases) - needed)


def sync_and_close(descriptor: int) -> None:
    """Raises OSError: what was written did not reach the disk."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
