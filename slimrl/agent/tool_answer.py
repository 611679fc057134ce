"""What a tool returned, as the text that the policy reads: a text as it is, and JSON for what JSON can say."""

import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from pathlib import PurePath
from typing import Any

import pydantic

SAID = "A tool returns a text, or what JSON can say: None, true, false, finite numbers, lists and dicts of such."
NOT_FINITE = "returned NaN or infinity, which is no number"
AS_TEXT = (decimal.Decimal, PurePath, uuid.UUID)


class NotFinite(ValueError):
    """What a tool returned could be told but for NaN or infinity in it, which follow from what the model asked."""


def answer_text(value: Any) -> str:
    """The value as text.

    Dataclasses, pydantic models, enumerations, sets, dates, paths and arrays (numpy, torch) are written as the dicts,
    lists and texts that they stand for.

    Raises:
        NotFinite: it has NaN or infinity, which JSON does not have.
        ValueError: it is neither text nor JSON, such as bytes.
    """
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration of texts its value
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except RecursionError as error:
        raise ValueError(f"returned {type(value).__name__} that is nested too deep. {SAID}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError) and _is_json_but_for_numbers(value):
            raise NotFinite(NOT_FINITE) from error
        raise ValueError(f"returned {type(value).__name__}: {error}. {SAID}") from error


def _is_json_but_for_numbers(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """What stands for an object that JSON does not know; raises TypeError if nothing does."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are no text; decode them")
    if isinstance(value, pydantic.BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, AS_TEXT):
        return str(value)
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise TypeError(f"{type(value).__name__} is neither text nor JSON")
