"""Folders that many sessions begin with: one read-only copy on disk, over which each session has an overlay of its own.

A folder is copied when the first session asks for it, and again after it was changed. Copies that no session uses are
removed, the oldest first, if there are more than KEPT of them.
"""

import asyncio
import hashlib
import os
import shutil
import stat
import tempfile
import weakref
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from slimrl.base.folder_lock import LOCK_FILE, folder_lock

PREFIX = "slimrl-folders-"
KEPT = 64
"""Most copies that are kept though no session uses them."""


class BaseFolders:
    """The copies of one sandbox. Used within one event loop; `close` removes them all."""

    def __init__(self) -> None:
        # Who may read the copies may write them too: the folder around them keeps the host's other users out.
        remove_left_folders()
        self._outer = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._held = ExitStack()
        self._held.callback(shutil.rmtree, self._outer, ignore_errors=True)
        self._held.enter_context(folder_lock(self._outer))
        self._at_exit = weakref.finalize(self, self._held.close)
        self.root = self._outer / "folders"
        """Folder with a folder for each copy."""
        self.root.mkdir(mode=0o755)
        self._copies: dict[str, asyncio.Future[None]] = {}
        """Copies that are there or are made: a session that gives up waiting does not end one for the others"""
        self._users: Counter[str] = Counter()
        """Copy -> number of sessions that use it, in the order of their first use."""

    async def take(self, folder: Path) -> str:
        """The name of a copy of what the folder holds now, which stays until it is given back. Raises OSError."""
        name = await asyncio.to_thread(_fingerprint, folder)
        if name not in self._copies:
            self._copies[name] = asyncio.ensure_future(asyncio.to_thread(_copy, folder, self.root / name))
        copy = self._copies[name]
        self._users[name] += 1
        try:
            await asyncio.shield(copy)
        except BaseException as error:
            self._users[name] -= 1
            if isinstance(error, OSError) and self._copies.get(name) is copy:
                del self._copies[name]
            raise
        return name

    def give_back(self, name: str) -> None:
        self._users[name] -= 1
        unused = [name for name, users in self._users.items() if not users and self._copies[name].done()]
        for other in unused[: max(0, len(unused) - KEPT)]:
            del self._users[other], self._copies[other]
            shutil.rmtree(self.root / other)

    def close(self) -> None:
        self._at_exit()


def remove_left_folders() -> None:
    """Remove the copies of this user's processes that were killed: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # One without a lock is just being made.
        with suppress(ValueError, OSError):
            if folder.stat().st_uid == os.geteuid() and (folder / LOCK_FILE).exists():
                with folder_lock(folder):
                    shutil.rmtree(folder)


def _fingerprint(folder: Path) -> str:
    """Text that is equal as long as nothing in the folder was changed. Raises OSError if there is no such folder."""
    digest = hashlib.sha256(os.fsencode(folder.resolve(strict=True)))
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                info = entry.stat(follow_symlinks=False)
                facts = (entry.path, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
                digest.update(repr(facts).encode("utf-8", "surrogateescape"))
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return digest.hexdigest()[:32]


def _copy(folder: Path, copy: Path) -> None:
    """Copy a folder so that every user may change what an overlay shows of it."""
    part = copy.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(folder, part, symlinks=True)
    _open_to_all(part)
    for path, folders, files in os.walk(part):
        for name in (*folders, *files):
            _open_to_all(Path(path, name))
    part.rename(copy)


def _open_to_all(path: Path) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISLNK(mode):
        runs = 0o111 if mode & 0o111 else 0
        path.chmod(stat.S_IMODE(mode) | 0o666 | runs)
