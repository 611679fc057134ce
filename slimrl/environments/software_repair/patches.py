"""Unified diffs of one text file: made, read, and applied exactly."""

import difflib
import re
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
CONTEXTS = (3, 6, 12, 25, 50, 100, 10_000)


@dataclass(kw_only=True)
class Hunk:
    """A place that a diff changes."""

    line: int
    """First line of the old text, from 1"""
    old: str
    new: str


def make(path: str, old: str, new: str) -> str:
    """A diff whose hunks have so much context that each side of one occurs once in its text."""
    for context in CONTEXTS:
        lines = difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=context
        )
        text = "".join(lines)
        if all(old.count(hunk.old) == 1 and new.count(hunk.new) == 1 for hunk in hunks(text)):
            break
    return text


def path_of(diff: str) -> str:
    """The path of the changed file."""
    return diff.split("\n", 2)[1].removeprefix("+++ b/")


def hunks(diff: str, *, reverse: bool = False) -> list[Hunk]:
    """The places that a diff changes, or with `reverse` those of the diff that undoes it."""
    found: list[Hunk] = []
    old, new = ("+", "-") if reverse else ("-", "+")
    for line in diff.splitlines(keepends=True)[2:]:
        if header := _HUNK.match(line):
            found.append(Hunk(line=int(header[2 if reverse else 1]), old="", new=""))
            continue
        if line[0] in (" ", old):
            found[-1].old += line[1:]
        if line[0] in (" ", new):
            found[-1].new += line[1:]
    return found


def apply(text: str, diff: str, *, reverse: bool = False) -> str:
    """Raises ValueError: the text is not the one of which the diff was made."""
    lines = text.splitlines(keepends=True)
    for hunk in reversed(hunks(diff, reverse=reverse)):
        old = hunk.old.splitlines(keepends=True)
        place = slice(hunk.line - 1, hunk.line - 1 + len(old))
        if lines[place] != old:
            raise ValueError(f"{path_of(diff)} does not have at line {hunk.line} what the patch changes")
        lines[place] = hunk.new.splitlines(keepends=True)
    return "".join(lines)
