"""Reads a JSONL file line by line and names every broken line in one error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SHOWN = 20
"""Broken lines that an error names; the others are counted."""


class OtherKind(ValueError):
    """Raised by `parse`: the line is of another kind of file, so that the lines after it need no reading."""


def read_jsonl(path: Path, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """What `parse` makes of each line's object, in order; empty lines are skipped.

    Args:
        parse: called with the object and its 1-based line number; says what is wrong with it by raising ValueError.
            An OtherKind that comes before any good line is the only one that is named.

    Raises:
        ValueError: the file is missing, holds no object, or has broken lines: `file:line: what is wrong`, one a line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    values: list[T] = []
    broken: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values.append(parse(_object(line), number))
            except OtherKind as error:
                if not values:
                    raise ValueError(f"{path}:{number}: {error}") from error
                broken.append(f"{path}:{number}: {error}")
            except ValueError as error:
                broken.append(f"{path}:{number}: {error}")
    if broken:
        raise ValueError(_summary(broken))
    if not values:
        raise ValueError(f"{path}: the file has no lines")
    return values


def _object(line: str) -> dict[str, Any]:
    if "\N{REPLACEMENT CHARACTER}" in line:
        raise ValueError("not UTF-8")
    text = line.rstrip()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = ", the line's end" if error.pos == len(text) else ""
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{place}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    return value


def _summary(broken: list[str]) -> str:
    lines = broken[:MAX_SHOWN]
    if len(broken) > MAX_SHOWN:
        lines.append(f"and {len(broken) - MAX_SHOWN} more broken lines")
    lines.append(f"{len(broken)} broken line{'s' if len(broken) > 1 else ''}.")
    return "\n".join(lines)
