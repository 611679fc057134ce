"""Types of settings: besides the type of a value they say its range or its form, which pydantic checks.

Numbers and booleans are strict, so that `on` is no boolean and `1_000` no number.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MISSING: Any = "???"
"""Default of a setting that a recipe must give; OmegaConf's word for it"""

Flag = Annotated[bool, Field(strict=True)]
Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Float = Annotated[float, Field(strict=True)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
Multiple = Annotated[float, Field(strict=True, ge=1)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveFraction = Annotated[float, Field(strict=True, gt=0, le=1)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1)]


def _or_off(least: int, off: int) -> AfterValidator:
    def check(value: int) -> int:
        if value < least and value != off:
            raise ValueError(f"{value}: must be at least {least}, or {off} for off.")
        return value

    return AfterValidator(check)


TopK = Annotated[int, Field(strict=True), _or_off(1, -1)]
AlarmSteps = Annotated[int, Field(strict=True), _or_off(4, 0)]

MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*?)(?:\.py)?\.([A-Za-z_]\w*)")
_SHELL_WORDS = re.compile(r"~(?=/|$)|.*?\$\{?(\w+)")
"""Parts of a path that a shell would expand: a home folder at its start, a variable."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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


FileName = Annotated[str, AfterValidator(_file_name)]
"""A name that becomes a file's or a metric's"""
FilePath = Annotated[str, AfterValidator(_path)]
"""A file or a folder"""
ImportPath = Annotated[str, AfterValidator(_import_path("function"))]
OptionalImportPath = Annotated[str, AfterValidator(_import_path("function", optional=True))]
OptionalClassPath = Annotated[str, AfterValidator(_import_path("Class", optional=True))]
ExceptionPath = Annotated[str, AfterValidator(_import_path("Exception"))]
