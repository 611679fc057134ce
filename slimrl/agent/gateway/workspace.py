"""A trajectory's own folders on this machine's disk, and what a command finds in its environment.

Nothing of them is left when the trajectory has ended: what one attempt wrote, no other one finds.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slimrl.base.threads import in_thread

log = logging.getLogger(__name__)

INHERITED = (
    "PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "SHELL", "USER", "LOGNAME", "LD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
)  # fmt: skip
"""The variables of slimrl's own environment that a command gets"""
REMOVE_S = 60.0
"""How long the removal of a workspace holds up its trajectory; then it goes on in the background"""

_REMOVALS, _RETRY_S = 5, 0.2
"""Processes that were killed may still write for a moment."""


@dataclass(frozen=True, kw_only=True)
class Workspace:
    root: Path
    """Folder that holds those below; it may also hold files that a sandboxed command does not see"""

    @property
    def work(self) -> Path:
        """Folder in which the command runs, empty at first"""
        return self.root / "work"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def make(self) -> None:
        """Make the folders. Raises OSError."""
        for folder in (self.work, self.home, self.tmp):
            folder.mkdir()


@asynccontextmanager
async def workspace() -> AsyncIterator[Workspace]:
    """A new workspace, which is removed at the end. Raises OSError: it cannot be made."""
    place = Workspace(root=Path(tempfile.mkdtemp(prefix="slimrl-agent-")))
    try:
        place.make()
        yield place
    finally:
        removal = in_thread(lambda: _remove(place.root))
        await asyncio.wait([removal], timeout=REMOVE_S)
        if not removal.done():
            log.warning("the removal of %s takes longer than %g s and goes on", place.root, REMOVE_S)
        elif error := removal.exception():
            log.warning("an agent's workspace cannot be removed: %s", error)


def command_environment(place: Workspace, reaching: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """A command's whole environment.

    Args:
        place: as the command sees it.
        reaching: how it reaches the gateway.
        named: what the recipe names; it wins.
    """
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if name in inherited:
            folders = filter(None, inherited[name].split(os.pathsep))
            inherited[name] = os.pathsep.join(map(os.path.abspath, folders))  # the command runs elsewhere
    return {**inherited, "HOME": str(place.home), "TMPDIR": str(place.tmp), **reaching, **named}


def _remove(root: Path) -> None:
    """Raises OSError: a process that goes on writes in it, or another user has files there."""
    for _ in range(_REMOVALS - 1):
        with suppress(OSError):
            return _remove_once(root)
        time.sleep(_RETRY_S)
    _remove_once(root)


def _remove_once(root: Path) -> None:
    _open_up(root)
    for _, inner, _, folder in os.fwalk(root):
        for name in inner:
            with suppress(NotADirectoryError):  # a link
                _open_up(name, folder)
    shutil.rmtree(root)


def _open_up(name: Path | str, within: int | None = None) -> None:
    """Let a folder be emptied: programs write-protect theirs, as Go does its modules. A link in its place, which a
    process that goes on may put there, is not followed.

    Args:
        within: descriptor of the folder that has it.
    """
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{folder}", 0o700)  # a descriptor of this kind needs no permission, and has no fchmod
    finally:
        os.close(folder)
