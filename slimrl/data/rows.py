"""Goes through the rows of a data file, and names every broken one in one error."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

MAX_SHOWN = 20
"""Broken rows that an error lists; the others are counted."""


class BrokenRows(ValueError):
    """Several rows of a file are broken."""

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
            broken.append(f"{path}:{number}: {error}")
            if isinstance(error, WrongFileKind) and not values:
                raise ValueError(broken[-1]) from error
    if broken:
        raise BrokenRows(broken, noun)
    if not values:
        raise ValueError(f"{path}: the file has no {noun}")
    return values


def summary(broken: Sequence[str], noun: str = "lines") -> str:
    """The number of problems and the first of them, one per line; a single one alone."""
    if len(broken) == 1:
        return broken[0]
    lines = [f"{len(broken)} broken {noun}:", *broken[:MAX_SHOWN]]
    if len(broken) > MAX_SHOWN:
        lines.append(f"and {len(broken) - MAX_SHOWN} more")
    return "\n".join(lines)
