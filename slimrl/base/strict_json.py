"""JSON read strictly: what other readers of JSON refuse or understand otherwise (RFC 8259, 4 and 6) is refused."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; of a key that is there twice the last one counts, as elsewhere.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or holds no JSON object; names the file, and the line if there is one.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not JSON: not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def strict_json(text: str, *, finite: bool = True) -> Any:
    """The value of a JSON text.

    Args:
        finite: refuse NaN, infinities and numbers beyond a 64-bit float.

    Raises:
        ValueError: it is no JSON, or an object has a key twice.
        RecursionError: lists and objects are nested too deeply.
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite_float} if finite else {}
    try:
        return json.loads(text, object_pairs_hook=_unique, **numbers)
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):
            raise ValueError("an integer has thousands of digits") from error
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"duplicate key {name}")
            seen.add(name)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a 64-bit float")
    return value


def refuse_no_json(value: Any, name: str) -> None:
    """Refuse a value that a Parquet file may hold and JSON does not have: a time, bytes, a decimal number, NaN.

    Args:
        name: of the value, for the error; what is within it is named by a path.

    Raises:
        ValueError: names the first such value and its type.
    """
    waiting = [(name, value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, dict):
            waiting += [(f"{path}.{key}", inner) for key, inner in one.items()]
        elif isinstance(one, list | tuple):
            waiting += [(f"{path}[{number}]", inner) for number, inner in enumerate(one)]
        elif isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{path} is {one}, which JSON does not have")
        elif not (one is None or isinstance(one, str | int | float)):
            raise ValueError(f"{path} is of type {type(one).__name__}, which JSON does not have")
