"""The text of a page, read back by scripted players: what the policy sees, and nothing else."""

import ast
import json
import re
from dataclasses import dataclass
from functools import cached_property

GOAL = "Goal: "
_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LINE = re.compile(rf"^\t*(?:\[(\d+)\] )?(\w+) {_TEXT}(.*)$")
_VALUE = re.compile(rf"\bvalue={_TEXT}")
_OPTIONS = re.compile(r"\boptions=(\[.*\])")


@dataclass(frozen=True, kw_only=True)
class Line:
    """An element of the page, or a text."""

    number: int | None
    """None for what cannot be acted on"""
    role: str
    name: str
    options: tuple[str, ...] = ()
    """Options of a list"""
    value: str = ""
    """Text of a field"""


@dataclass(frozen=True)
class Page:
    text: str

    @cached_property
    def lines(self) -> list[Line]:
        return [line for line in map(_read, self.text.splitlines()) if line is not None]

    @property
    def goal(self) -> str:
        """The task, which the first observation says."""
        return next(line.removeprefix(GOAL) for line in self.text.splitlines() if line.startswith(GOAL))

    @property
    def numbers(self) -> list[int]:
        return [line.number for line in self.lines if line.number is not None]

    @property
    def texts(self) -> list[str]:
        return [line.name for line in self.lines if line.role == "StaticText"]

    def all(self, *roles: str) -> list[Line]:
        """The elements of these roles."""
        return [line for line in self.lines if line.role in roles and line.number is not None]

    def find(self, name: str) -> int | None:
        """Number of the first element of this name, or else of this name but for marks at its end; None without one."""
        for same in (str, _without_marks):
            for line in self.lines:
                if line.number is not None and same(line.name) == same(name):
                    return line.number
        return None

    def number_of(self, name: str) -> int:
        """The same; raises LookupError without one."""
        number = self.find(name)
        if number is None:
            raise LookupError(f"the page shows no {name!r}:\n{self.text}")
        return number


def _without_marks(name: str) -> str:
    return name.rstrip(".,").strip()


def _read(line: str) -> Line | None:
    match = _LINE.match(line)
    if match is None:
        return None
    number, role, name, rest = match.groups()
    options, value = _OPTIONS.search(rest), _VALUE.search(rest)
    return Line(
        number=int(number) if number else None,
        role=role,
        name=_literal(name),
        options=tuple(_literals(options[1])) if options else (),
        value=_literal(value[1]) if value else "",
    )


def _literal(written: str) -> str:
    return str(ast.literal_eval(written))


def _literals(written: str) -> list[str]:
    """A list as Python or JSON writes it; both are literals of Python."""
    return [str(one) for one in ast.literal_eval(written)]


def quoted(text: str) -> str:
    """A text as an argument of an action."""
    return json.dumps(text, ensure_ascii=False)
