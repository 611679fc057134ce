"""The folder that a session of the bubblewrap sandbox begins with: an overlay over a copy that others share, or, on
kernels without overlays over a tmpfs, a tar file that the session unpacks."""

import os
import tarfile
import tempfile
from pathlib import Path
from typing import Protocol

from slimrl.agent.sandbox.base_folders import BaseFolders


class SessionFolder(Protocol):
    """What a session gets for its folder; `close` when it has ended."""

    archive: int | None
    """Descriptor of a tar file, which the session unpacks"""
    base: str
    """Name of the copy over which the session works; "" for none"""

    def read(self) -> bytes | None:
        """The tar file; None for a folder that the session sees itself."""

    def close(self) -> None: ...


class OverlaidFolder:
    archive: int | None = None

    def __init__(self, folders: BaseFolders, base: str) -> None:
        self._folders, self.base = folders, base

    def read(self) -> None:
        return None

    def close(self) -> None:
        self._folders.give_back(self.base)


class ArchivedFolder:
    """A folder's files in an unnamed file on disk."""

    base = ""

    def __init__(self, folder: Path) -> None:
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(folder, arcname=".")
            file.seek(0)
            self.archive: int | None = os.dup(file.fileno())

    def read(self) -> bytes:
        assert self.archive is not None
        return os.pread(self.archive, os.fstat(self.archive).st_size, 0)

    def close(self) -> None:
        assert self.archive is not None
        os.close(self.archive)
