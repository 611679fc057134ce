"""Reads a JSONL file line by line and names every broken line in one error."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

MAX_SHOWN = 20
"""Broken lines that an error names; the others are counted."""

MAX_DEPTH = 100
"""Lists and objects within each other in one line. Code that goes through a value calls itself at each of them."""


class OtherKind(ValueError):
    """Raised by `parse`: the line is of another kind of file, so that the lines after it need no reading."""


def read_jsonl(path: Path, parse: Callable[[dict[str, Any], int], T], *, finite: bool = True) -> list[T]:
    """What `parse` makes of each line's object, in order; empty lines are skipped.

    Args:
        parse: called with the object and its 1-based line number; says what is wrong with it by raising ValueError.
            An OtherKind that comes before any good line is the only one that is named.
        finite: refuse NaN and infinities, which are no JSON.

    Raises:
        ValueError: the file is missing, holds no object, or has broken lines: `file:line: what is wrong`, one a line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    values: list[T] = []
    broken: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values.append(parse(_object(line, finite), number))
            except OtherKind as error:
                if not values:
                    raise ValueError(f"{path}:{number}: {error}") from error
                broken.append(f"{path}:{number}: {error}")
            except ValueError as error:
                broken.append(f"{path}:{number}: {error}")
    if broken:
        raise ValueError(summary(broken))
    if not values:
        raise ValueError(f"{path}: the file has no lines")
    return values


def _object(line: bytes, finite: bool) -> dict[str, Any]:
    try:
        text = line.decode().rstrip()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    numbers: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite_float} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=_object_of, **numbers)
    except json.JSONDecodeError as error:
        place = ", the line's end" if error.pos == len(text) else ""
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{place}") from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if "\\u" in text:
        _refuse_surrogates(value)
    return value


_TOO_DEEP = f"lists and objects more than {MAX_DEPTH} deep in each other"


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)} is there twice")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is larger than any number of 64 bits")
    return value


def _depth(value: Any) -> int:
    """Lists and objects in each other, found without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def _refuse_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"\\u{ord(error.object[error.start]):04x} is half of a character, without its other half"
        ) from error


def summary(broken: list[str]) -> str:
    """How many problems of lines there are, and the first of them, one a line; a single one stands alone."""
    if len(broken) == 1:
        return broken[0]
    lines = [f"{len(broken)} broken lines:", *broken[:MAX_SHOWN]]
    if len(broken) > MAX_SHOWN:
        lines.append(f"and {len(broken) - MAX_SHOWN} more")
    return "\n".join(lines)
