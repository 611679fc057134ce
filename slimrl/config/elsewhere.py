"""Names that settings have in slime and verl, what each is here, and what differs: the table `elsewhere.tsv`.

The tables of docs/coming_from_slime_and_verl.md have the same rows, which a test compares. A row's cells are Markdown;
`A` is `B` in the last one tells that a value A of theirs is our B.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".tsv")

_CODE = re.compile(r"`([^`]+)`")
_VALUE = re.compile(r"`([^`\s]+)` is `([^`\s]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A row of the table."""

    program: str
    theirs: tuple[str, ...]
    """verl's keys, slime's flags"""
    ours: str
    """Settings or commands in backticks, or `none`"""
    differs: str

    @property
    def counterparts(self) -> tuple[str, ...]:
        """Our settings or commands; empty if there is none."""
        return tuple(_CODE.findall(self.ours))

    @property
    def values(self) -> Mapping[str, str]:
        """Their value -> ours, of those that are called otherwise."""
        return dict(_VALUE.findall(self.differs))

    @property
    def note(self) -> str:
        """What differs, as plain text."""
        return _LINK.sub(r"\1", self.differs).replace("`", "")


@cache
def table() -> tuple[Elsewhere, ...]:
    """All rows, in the order of the page."""
    _, *lines = TABLE.read_text().splitlines()
    cells = (line.split("\t") for line in lines)
    return tuple(
        Elsewhere(program=program, theirs=tuple(theirs.split(" ")), ours=ours, differs=differs)
        for program, theirs, ours, differs in cells
    )


@cache
def _by_name() -> dict[str, Elsewhere]:
    """The rows by verl's keys and by slime's flags, as a recipe would write these: `rollout_batch_size`."""
    return {name.removeprefix("--").replace("-", "_"): row for row in table() for name in row.theirs}


def row_of(key: str) -> Elsewhere | None:
    """The row of a key that is one of verl's, or a name of slime's alone or, with several words, in any section."""
    name = key.replace("-", "_").lower()
    last = name.rpartition(".")[2]
    return _by_name().get(name) or (_by_name().get(last) if "_" in last else None)


def is_section_elsewhere(key: str) -> bool:
    """Whether keys of verl's stand below this one."""
    return any(name.startswith(f"{key}.") for name in _by_name())


def value_here(setting: str, value: Any) -> str | None:
    """What a value of slime's or verl's is called here, where it stands for a setting of ours."""
    rows = (row for row in table() if row.counterparts[:1] == (setting,))
    return next((row.values[value] for row in rows if isinstance(value, str) and value in row.values), None)
