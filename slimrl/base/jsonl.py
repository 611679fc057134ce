"""JSONL files: read line by line, with every broken line in one error, and written."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from slimrl.base.rows import WrongFileKind, parse_rows
from slimrl.base.strict_json import strict_json

GZIP = ".gz"
BOM = "\ufeff"
"""Byte order mark, which some programs write at the beginning of a file."""
JSON_ENDINGS = (".jsonl", ".json", ".ndjson", "")
READ = "What can be read is a file .parquet, or .jsonl (also .jsonl.gz), which has one JSON object in each line"
MAX_DEPTH = 100
"""Nesting of lists and objects in one line, limited because code that walks through a value is recursive."""


def read_jsonl[T](path: Path, parse: Callable[[dict[str, Any], int], T], *, finite: bool = True) -> list[T]:
    """The result of `parse` for each line's object, in order; empty lines are skipped.

    A file whose name ends in GZIP is compressed.

    Args:
        parse: called with the object and its 1-based line number, as by `parse_rows`.
        finite: refuse NaN and infinities, which are not JSON.

    Raises:
        ValueError: the file is missing, no whole gzip file, has no objects, or has broken lines; names them as
            `parse_rows` does.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with unzipped(path) as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        return parse_rows(path, lines, lambda line, number: parse(_object(line, finite, path, number), number))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Write a file, which replaces one that is there; returns the number of lines."""
    count = 0
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


@contextmanager
def unzipped(path: Path) -> Iterator[BufferedIOBase]:
    """A file to read from, decompressed on the way if its name ends in GZIP.

    Raises:
        ValueError: within the block, it is no whole gzip file.
    """
    try:
        with gzip.open(path) if path.suffix == GZIP else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from error


def data_stem(path: Path) -> str:
    """The name of a data file without its endings."""
    return Path(path.name.removesuffix(GZIP)).stem


def _object(line: bytes, finite: bool, path: Path, number: int) -> dict[str, Any]:
    try:
        text = line.decode().removeprefix(BOM).rstrip()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    try:
        value = strict_json(text, finite=finite)
    except json.JSONDecodeError as error:
        if number == 1 and (kind := _other_kind(path, text)):
            raise WrongFileKind(f"{kind}. {READ}") from error
        place = ", the line's end" if error.pos == len(text) else ""
        raise ValueError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{place}") from error
    except RecursionError as error:
        raise ValueError(_too_deep(MAX_DEPTH)) from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(_too_deep(MAX_DEPTH))
    if "\\u" in text:
        _refuse_surrogates(value)
    return value


def _other_kind(path: Path, first_line: str) -> str | None:
    """What a file is whose first line is not JSON, if its ending or that line tells."""
    ending = Path(path.name.removesuffix(GZIP)).suffix
    if ending not in JSON_ENDINGS:
        return f"not JSON: this is a file {ending}"
    return "this is a JSON array over several lines" if first_line.startswith("[") else None


def _too_deep(most: int) -> str:
    return f"lists and objects are nested more than {most} deep"


def _depth(value: Any) -> int:
    """Nesting of lists and objects, found without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def refuse_unwritable(value: Any) -> None:
    """Refuse what could be written into a line of a file but not be read again, a part of whose depth it is.

    Raises:
        ValueError: it is nested too deep, or has half of a surrogate pair.
    """
    most = MAX_DEPTH // 2
    if _depth(value) > most:
        raise ValueError(_too_deep(most))
    _refuse_surrogates(value)


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair, without the other half"
        ) from error
