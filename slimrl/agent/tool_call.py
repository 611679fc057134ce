"""Calls of tools. A malformed call is a value, not an exception: the model reads the problem."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A well-formed call of a tool."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The call's id as the model wrote it, if its format has ids."""


@dataclass(frozen=True, kw_only=True)
class MalformedCall:
    """Text that was meant as a call of a tool."""

    problem: str
    """An error message for the model."""
    id: str = ""
    name: str = ""
    """The tool that it calls, if that can be read and there is one."""
