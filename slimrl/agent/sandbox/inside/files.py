"""Programs that put files into a session and say what changed there. They run in the session's folder, confined as all
programs are, so they may meet whatever another program left.

`put` reads a tar file from stdin. `changed` compares the folder with the one that the session began with: BASE, or a
tar file on stdin. It prints a JSON object of changed paths, each with the old and the new content in base64, null where
there is none; `diff` prints a unified diff.
"""

import base64
import difflib
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator

BASE = "/base"
"""The folder that the session began with, if it works in an overlay over it."""
CACHES = ("__pycache__", ".pytest_cache")
"""Names of folders that are left out: programs write them by the way."""
_NO_NEWLINE = "\\ No newline at end of file"
Files = dict[str, tuple[int, bytes]]
"""Path -> kind of the file (S_IFREG, or S_IFLNK with its target as content), content."""


def put() -> None:
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(".", filter="data")


def changed(before: Files) -> None:
    found = {path: (old[1:], new[1:]) for path, old, new in _changes(before)}
    json.dump(
        {
            path: [base64.b64encode(side[0]).decode() if side else None for side in sides]
            for path, sides in found.items()
        },
        sys.stdout,
    )


def diff(before: Files) -> None:
    for path, old, new in _changes(before):
        sys.stdout.write(_file_diff(path, old, new))


def base(folder: str = BASE) -> Files:
    """The files of a folder."""
    files: Files = {}
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in CACHES)
        for name in [*folders, *names]:
            path = os.path.join(top, name)
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            relative = os.path.relpath(path, folder)
            if kind == stat.S_IFLNK:
                files[relative] = kind, os.fsencode(os.readlink(path))
            elif kind == stat.S_IFREG:
                with open(path, "rb") as file:
                    files[relative] = kind, file.read()
    return files


def archived() -> Files:
    """The files of a tar file on stdin."""
    files: Files = {}
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for one in archive:
            path = os.path.normpath(one.name)
            if any(part in CACHES for part in path.split("/")):
                continue
            if one.issym():
                files[path] = stat.S_IFLNK, os.fsencode(one.linkname)
            elif content := archive.extractfile(one):
                files[path] = stat.S_IFREG, content.read()
    return files


def _changes(before: Files) -> Iterator[tuple[str, tuple[int, bytes] | tuple[()], tuple[int, bytes] | tuple[()]]]:
    """Path, what it was and what it is, in the order of the paths; () for a file that is not there."""
    after = base(".")
    for path in sorted({*before, *after}):
        old, new = before.get(path, ()), after.get(path, ())
        if old != new:
            yield path, old, new


def _file_diff(path: str, old: tuple[int, bytes] | tuple[()], new: tuple[int, bytes] | tuple[()]) -> str:
    """The diff of one file, as git writes it: with lines that say so where a file is new, deleted, binary or a link."""
    a, b = _quoted(f"a/{path}"), _quoted(f"b/{path}")
    parts = [f"diff --git {a} {b}\n"]
    if not old and new:
        parts.append(f"new file mode {_mode(new[0])}\n")
    if old and not new:
        parts.append(f"deleted file mode {_mode(old[0])}\n")
    if old and new and old[0] != new[0]:
        return _file_diff(path, old, ()) + _file_diff(path, (), new)
    before, after = (_lines(side[1]) if side else [] for side in (old, new))
    names = (a if old else "/dev/null", b if new else "/dev/null")
    if before is None or after is None:
        return "".join([*parts, f"Binary files {names[0]} and {names[1]} differ\n"])
    for line in difflib.unified_diff(before, after, *names):
        parts.append(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n")
    return "".join(parts)


def _lines(content: bytes) -> list[str] | None:
    """Lines with their ends; None for what is no text."""
    if b"\0" in content:
        return None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _mode(kind: int) -> str:
    return "120000" if kind == stat.S_IFLNK else "100644"


def _quoted(path: str) -> str:
    """The path; in double quotes, with escapes, if it holds a character that would end its line or name."""
    printable = path.isprintable() and '"' not in path and "\\" not in path
    return path if printable else json.dumps(path)
