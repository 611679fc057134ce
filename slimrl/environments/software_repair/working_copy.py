"""The copy of a package that a policy works on: what is planted in it, what the policy is told, and what it changed."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimrl.agent.sandbox.interface import FileChange
from slimrl.environments.software_repair import patches
from slimrl.environments.software_repair.grading import counts

TASK = (
    "{issue}\n\nThe current folder holds the package's code{tests}. Repair the code; only changes of the package's own "
    "Python files count."
)
MAX_ENTRIES, MAX_BYTES = 20_000, 16 * 1024**2
"""Most files and folders of a copy, and most bytes of its files that count; a copy that has more holds no repair."""


def task_text(issue: str, *, hidden: bool) -> str:
    """What the policy is told.

    Args:
        hidden: whether the tests that catch the bug are taken away.
    """
    return TASK.format(issue=issue, tests=", without the tests that show this" if hidden else " and its tests")


def planted(base: Path, metadata: Mapping[str, Any], *, hidden: bool) -> dict[str, bytes | None]:
    """The files in which the copy differs from the sound package: the one with the bug, and with None those that are
    taken away.

    Args:
        base: the sound package.
        metadata: of the task.
        hidden: whether the tests that catch the bug are taken away.
    """
    patch = metadata["patch"]
    path = patches.path_of(patch)
    files: dict[str, bytes | None] = {path: patches.apply((base / path).read_text(), patch, reverse=True).encode()}
    if hidden:
        files |= dict.fromkeys(sorted({test.partition("::")[0] for test in metadata["FAIL_TO_PASS"]}))
    return files


def lost(metadata: Mapping[str, Any]) -> dict[str, FileChange]:
    """The change that stands for a copy that cannot be read: the file with the bug is gone."""
    return {patches.path_of(metadata["patch"]): FileChange(before=None, after=None)}


def changed_files(base: Path, work: Path, metadata: Mapping[str, Any]) -> dict[str, FileChange]:
    """The files that count and differ from the sound package's; only that the file with the bug is gone, of a copy that
    is too large.

    Args:
        work: the copy, which may hold whatever a program can make; no link in it is followed.
    """
    try:
        before, after = _contents(base, metadata), _contents(work, metadata)
    except ValueError:
        return lost(metadata)
    paths = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    return {path: FileChange(before=before.get(path), after=after.get(path)) for path in paths}


def _contents(folder: Path, metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Raises ValueError: the folder is larger than a copy may be."""
    found: dict[str, bytes] = {}
    entries, left = 0, MAX_BYTES
    for top, folders, names in os.walk(folder):
        entries += len(folders) + len(names)
        if entries > MAX_ENTRIES:
            raise ValueError(f"{folder} holds more than {MAX_ENTRIES} files and folders")
        for path in (Path(top, name) for name in names):
            relative = path.relative_to(folder).as_posix()
            if not counts(relative, metadata) or (content := _content(path, left)) is None:
                continue
            found[relative] = content
            left -= len(content)
    return found


def _content(path: Path, most: int) -> bytes | None:
    """What a file holds; None for what is none or cannot be read. Raises ValueError: that is more than `most` bytes."""
    with suppress(OSError):
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"{path} is larger than what is left of {MAX_BYTES} bytes")
        return content
    return None
