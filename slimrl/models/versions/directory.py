"""The folder that holds the versions of one run, `v000012` each: begun, published, chained and pruned.

A version is written to `.v000012.partial` and renamed when it is whole, so that its name never stands for less. What is
to be removed gets a name of that kind first. A file that somebody still reads may keep its folder on a network's file
system for a while; then the next version tries again.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from slimrl.models.versions.manifest import Manifest, VersionRef, check_files, read_manifest

_NAME = re.compile(r"v(\d{6,})")
_UNFINISHED = re.compile(r"\.v\d{6,}\.(partial|[0-9a-f]{8}\.removed)")

log = logging.getLogger(__name__)


class VersionDirectory:
    """Written by one process, read by any number."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def versions(self) -> list[int]:
        """Those that are whole, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.root.iterdir()) if self.root.is_dir() else ()
        return sorted(int(match.group(1)) for match in matches if match)

    def begin(self, version: int) -> Path:
        """A new folder to write the version into; what an attempt left behind that broke off is removed.

        Versions beyond it, which a run wrote before it was continued from an earlier checkpoint, are removed too.
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
        """Remove what is not whole."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    self._remove(path)

    def publish(self, partial: Path, version: int) -> Path:
        """Give a whole version its name, in place of an earlier writing of the same version."""
        folder = self.folder(version)
        _sync(partial)
        replaced = self._set_aside(folder) if folder.exists() else None
        partial.rename(folder)
        _sync(self.root)
        if replaced is not None:
            self._remove(replaced)
        return folder

    def has(self, ref: VersionRef) -> bool:
        """Whether this very writing of a version is there, and its manifest can be read."""
        try:
            return read_manifest(self.folder(ref.version)).ref == ref
        except ValueError:
            return False

    def prune(self, keep: int) -> None:
        """Remove all but the newest `keep` versions and those that these build on."""
        bases = {version: self._base_version(version) for version in self.versions()}
        for version in superfluous(bases, keep):
            self._remove(self.folder(version))

    def chain(self, target: Manifest, have: VersionRef | None) -> list[Manifest]:
        """What leads from the version `have` to `target`, oldest first: deltas, or a whole version and deltas.

        Args:
            have: None, or a version off the way to the target, leads from a whole version.

        Raises:
            ValueError: a base is missing, is another writing of its version, or lacks a file or a part of one.
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
        """Give a folder another name, under which `clean` finds it."""
        version = folder.name.removeprefix(".").partition(".")[0]
        return folder.rename(self.root / f".{version}.{secrets.token_hex(4)}.removed")

    def _remove(self, folder: Path) -> None:
        """Take a folder's name away, and then the folder, if not today, then with the next version."""
        if not folder.name.endswith(".removed"):
            folder = self._set_aside(folder)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            log.warning("%s could not be removed; the next version tries again: %s", folder, error)

    def _base_version(self, version: int) -> int | None:
        """None too for a version whose manifest cannot be read: nobody can load it, so it needs no other."""
        try:
            base = read_manifest(self.folder(version)).base
        except ValueError:
            return None
        return base.version if base else None

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
    """Versions, ascending, that are neither among the newest `keep` nor below one of these.

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


def _sync(folder: Path) -> None:
    """Names in a folder, as opposed to what is in the files, reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
