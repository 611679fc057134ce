"""Types of settings: besides the type of a value they say its range or its form, which pydantic checks.

Numbers and booleans are strict, so that `on` is no boolean and `1_000` no number. pydantic is not imported here: that
takes as long as all else, and most processes that know the settings read no recipe.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

MISSING: Any = "???"
"""Default of a setting that a recipe must give; OmegaConf's word for it"""


class Strict:
    """Only a value of the type itself, and for a float an int; `pydantic.Strict` is the same."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class Checked:
    """A function that returns the value, or raises ValueError; `pydantic.AfterValidator` is the same."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(source))


Flag = Annotated[bool, Strict()]
Int = Annotated[int, Strict()]
PositiveInt = Annotated[int, Strict(), Ge(1)]
NonNegativeInt = Annotated[int, Strict(), Ge(0)]
CountOrAll = Annotated[int, Strict(), Ge(-1)]
Float = Annotated[float, Strict()]
PositiveFloat = Annotated[float, Strict(), Gt(0)]
NonNegativeFloat = Annotated[float, Strict(), Ge(0)]
Multiple = Annotated[float, Strict(), Ge(1)]
Fraction = Annotated[float, Strict(), Ge(0), Le(1)]
PositiveFraction = Annotated[float, Strict(), Gt(0), Le(1)]
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]


def _or_off(least: int, off: int) -> Checked:
    def check(value: int) -> int:
        if value < least and value != off:
            raise ValueError(f"{value}: must be at least {least}, or {off} for off.")
        return value

    return Checked(check)


TopK = Annotated[int, Strict(), _or_off(1, -1)]
AlarmSteps = Annotated[int, Strict(), _or_off(4, 0)]

MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*?)(?:\.py)?\.([A-Za-z_]\w*)")
_SHELL_WORDS = re.compile(r"~(?=/|$)|.*?\$\{?(\w+)")
"""Parts of a path that a shell would expand: a home folder at its start, a variable."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _finite(value: Any) -> Any:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(item)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value}: must be a finite number.")
    return value


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name; use letters, digits, '.', '_' and '-'.")
    return name


def _path(path: str) -> str:
    if found := _SHELL_WORDS.match(path):
        raise ValueError(f"{path!r} is not expanded. Write ${{oc.env:{found[1] or 'HOME'}}} instead.")
    return path


def _import_path(kind: str, *, optional: bool = False) -> Callable[[str], str]:
    def check(path: str) -> str:
        if not MODULE_FUNCTION.fullmatch(path) and (path or not optional):
            found = _DOTTED.fullmatch(path)
            meant = f" Did you mean {found[1]}:{found[2]}?" if found else ""
            raise ValueError(f"{path!r} is not an import path; write module:{kind}.{meant}")
        return path

    return check


FiniteValue = Annotated[Any, Checked(_finite)]
"""Any value of YAML; the numbers in it are finite"""
FileName = Annotated[str, Checked(_file_name)]
"""A name that becomes a file's or a metric's"""
FilePath = Annotated[str, Checked(_path)]
"""A file or a folder"""
ImportPath = Annotated[str, Checked(_import_path("function"))]
OptionalImportPath = Annotated[str, Checked(_import_path("function", optional=True))]
OptionalClassPath = Annotated[str, Checked(_import_path("Class", optional=True))]
ExceptionPath = Annotated[str, Checked(_import_path("Exception"))]
