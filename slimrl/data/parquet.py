"""Reads a Parquet file row by row and names every broken row in one error."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slimrl.base.rows import parse_rows

BATCH_ROWS = 1024
"""Number of rows that are decoded at a time."""


def read_parquet[T](path: Path, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """The result of `parse` for each row, in order.

    All structures of a column have the same keys, so a key that one lacks is null there. Such keys are left out, except
    `content`, which is null in a message that only calls tools.

    Args:
        parse: called with the row's columns and its number from 1, as by `parse_rows`.

    Raises:
        ValueError: the file is missing, is not Parquet, has no rows, or has broken ones: `file:row: problem`.
    """
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return parse_rows(path, enumerate(_rows(file), 1), parse, noun="rows")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a whole Parquet file: {error}") from error


def _rows(file: Any) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(batch_size=BATCH_ROWS):
        for row in batch.to_pylist():
            yield {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """A value whose structures lack their keys that are null."""
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None or key == "content"}
    return value
