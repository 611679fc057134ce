"""Data files in the layout that their authors chose: the format by the file's ending, the columns by their names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import read_jsonl
from slimrl.config.problems import suggestion
from slimrl.data.parquet import read_parquet

PARQUET = ".parquet"


def read_rows[T](path: Path, parse: Callable[[dict[str, Any], int], T]) -> list[T]:
    """The result of `parse` for each row of a Parquet file, or for each line of any other, which is JSONL.

    Raises:
        ValueError: see read_parquet and read_jsonl.
    """
    return read_parquet(path, parse) if path.suffix == PARQUET else read_jsonl(path, parse)


def rename_columns(row: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Rename the columns of a row to our names.

    Args:
        keys: our name -> the file's; `a.b` is the key `b` of the column `a`, unless a column has that whole name. Empty
            if the file has our names.

    Returns:
        The named columns, an integer `id` as text. The others are its metadata, unless `keys` names a column for that.

    Raises:
        ValueError: a named column is not there, or the label is null.
    """
    if not keys:
        return row
    named = {name: _column(row, column, name) for name, column in keys.items()}
    if "label" in named and named["label"] is None:
        raise ValueError(f"{keys['label']} is null, which is the label")
    if isinstance(named.get("id"), int):
        named["id"] = str(named["id"])
    rest = {column: value for column, value in row.items() if column not in keys.values()}
    return {"metadata": rest, **named}


def _column(row: dict[str, Any], column: str, name: str) -> Any:
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            known = [*map(str, row), *(f"{outer}.{key}" for outer in row for key in _keys(row[outer]))]
            has = f" It has {', '.join(known)}."
            raise ValueError(f"no column {column} for `{name}`.{suggestion(column, known) or has}")
        value = value[part]
    return value


def _keys(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, dict) else []
