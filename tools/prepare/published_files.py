"""Reads a downloaded file of a data set, in any format in which such files are published."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import GZIP, read_jsonl, unzipped
from slimrl.base.rows import parse_rows
from slimrl.data.columns import PARQUET
from slimrl.data.parquet import read_parquet

ENDINGS = (PARQUET, ".jsonl", f".jsonl{GZIP}", ".json", f".json{GZIP}", ".csv")


def read_published[T](path: Path, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """The result of `parse` for each row of a Parquet, JSONL, JSON (a list of objects) or CSV file.

    JSONL and JSON may be compressed with gzip.

    Raises:
        ValueError: the ending is another one, the file is missing or damaged, or has broken rows.
    """
    if not path.name.endswith(ENDINGS):
        raise ValueError(f"{path}: ends in none of {', '.join(ENDINGS)}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == PARQUET:
        return read_parquet(path, parse)
    if path.suffix == ".csv":
        return parse_rows(path, enumerate(_csv_rows(path), 1), parse, noun="rows")
    if Path(path.name.removesuffix(GZIP)).suffix == ".json" and _starts_a_list(path):
        return parse_rows(path, enumerate(_objects(path), 1), parse, noun="rows")
    return read_jsonl(path, parse)


def num_rows(path: Path) -> int | None:
    """Rows of a Parquet file, and lines of a JSONL or CSV file; None of a file in one piece, or one that is refused."""
    if not path.is_file() or not path.name.endswith((PARQUET, ".jsonl", f".jsonl{GZIP}", ".csv")):
        return None
    if path.suffix != PARQUET:
        with unzipped(path) as file:
            return sum(1 for _ in file)
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError):
        # `read_published` says what is wrong with it.
        return None


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not CSV in UTF-8: {error}") from error


def _starts_a_list(path: Path) -> bool:
    """Unlike a file named .json that holds one object per line."""
    with unzipped(path) as file:
        return next((line.lstrip()[:1] for line in file if line.strip()), b"") == b"["


def _objects(path: Path) -> list[dict[str, Any]]:
    with unzipped(path) as file:
        text = file.read()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{path}: must be a list of objects")
    return values
