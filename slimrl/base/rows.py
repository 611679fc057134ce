"""Goes through the rows of a data file, and names every broken one in one error."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slimrl.base.visible import short_words

MAX_SHOWN = 20
"""Broken rows that an error lists; the others are counted."""
MAX_ALIKE = 3
"""Most rows with the same problem that are listed one by one."""


class BrokenRows(ValueError):
    """At least one row of a file is broken."""

    def __init__(self, broken: Sequence[str], noun: str = "lines") -> None:
        super().__init__(summary(broken, noun))
        self.count = len(broken)


class WrongFileKind(ValueError):
    """Raised by `parse`: the row belongs to another kind of file, so the other rows need no check."""


def parse_rows[R, T](
    path: Path, rows: Iterable[tuple[int, R]], parse: Callable[[R, int], T], *, noun: str = "lines"
) -> list[T]:
    """The result of `parse` for each row, in order.

    Args:
        rows: pairs of a 1-based number and the row.
        parse: called with a row and its number; raises ValueError if the row is wrong. If it raises WrongFileKind
            before any good row, the error names that row alone.
        noun: what rows of this kind of file are called.

    Raises:
        ValueError: the file has no rows, or broken ones: `file:number: problem`, one per line.
    """
    values: list[T] = []
    broken: list[str] = []
    for number, row in rows:
        try:
            values.append(parse(row, number))
        except ValueError as error:
            broken.append(f"{path}:{number}: {short_words(str(error))}")
            if isinstance(error, WrongFileKind) and not values:
                raise ValueError(broken[-1]) from error
    if broken:
        raise BrokenRows(broken, noun)
    if not values:
        raise ValueError(f"{path}: the file has no {noun}")
    return values


def summary(broken: Sequence[str], noun: str = "lines") -> str:
    """The number of problems and the first of them, one per line; a single one alone. Of problems that more than
    MAX_ALIKE rows share, but for numbers in them, the first stands for all."""
    if len(broken) == 1:
        return broken[0]
    alike: dict[str, list[str]] = {}
    for problem in broken:
        alike.setdefault(_cause(problem), []).append(problem)
    shown = []
    for problem in broken:
        same = alike[_cause(problem)]
        if len(same) <= MAX_ALIKE:
            shown.append((problem, 1))
        elif problem is same[0]:
            shown.append((f"{problem} (so in {len(same)} {noun}, of which this is the first)", len(same)))
    lines = [f"{len(broken)} broken {noun}:", *(text for text, _ in shown[:MAX_SHOWN])]
    if len(shown) > MAX_SHOWN:
        lines.append(f"and {sum(count for _, count in shown[MAX_SHOWN:])} more")
    return "\n".join(lines)


def _cause(problem: str) -> str:
    """A problem without its place and its numbers."""
    return re.sub(r"\d+", "0", re.sub(r"^.*?:\d+: ", "", problem))
