"""YAML with line numbers: a document becomes a flat list of values, each with its key and its line.

Scalars follow the YAML 1.2 core rules, so that `off` is a word and `1e-6` a number.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from slimrl.config.keys import is_section
from slimrl.config.problems import Problem


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A value that a file or the command line gives to a key."""

    key: str
    """Dotted key of the setting."""
    value: Any
    where: str
    """Where the value was given: `file:line` or `command line`."""

    def problem(self, message: str) -> Problem:
        return Problem(where=self.where, key=self.key, message=message)


MAX_DEPTH = 50
"""Nesting of a recipe's mappings and lists; much deeper ones exceed Python's stack"""
MAX_VALUES = 5_000
"""Keys and values of a recipe, those that `*name` repeats counted each time"""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2 in place of those of 1.1, and with bounds."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}
        """Keys and values of a node that is complete, by its id"""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _wrong(f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise _wrong("an alias within what it stands for", mark)
        if id(node) not in self._sizes:
            inside = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [part for pair in inside for part in pair] if isinstance(node, yaml.MappingNode) else inside
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
            if self._sizes[id(node)] > MAX_VALUES:
                raise _wrong(f"more than {MAX_VALUES} values, those that aliases repeat included", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            # What PyYAML raises for a scalar that its tag does not fit, such as `!!timestamp x`.
            raise _wrong(f"{_short(str(getattr(node, 'value', '')))!r} is no {node.tag}", node.start_mark) from error
        if isinstance(value, str) and "\0" in value:
            raise _wrong("a text with a NUL character", node.start_mark)
        return value


class Refused(yaml.MarkedYAMLError):
    """The text is valid YAML, and no recipe."""


def _wrong(problem: str, mark: Any) -> Refused:
    return Refused(problem=problem, problem_mark=mark)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), None)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    None,
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), None)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    value = float(re.sub(r"\.(inf|nan)", r"\1", node.value.lower()))
    if math.isinf(value) and "inf" not in node.value.lower():
        raise _wrong(f"{_short(node.value)} is beyond a number of 64 bits", node.start_mark)
    return value


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # More digits are beyond 64 bits, and thousands of them take Python long.
    value = int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10) if len(node.value) < 100 else 2**64
    if not -(2**63) <= value < 2**64:
        raise _wrong(f"{_short(node.value)} is beyond an integer of 64 bits", node.start_mark)
    return value


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


class YamlSource:
    """One YAML text: its root node and the entries below it."""

    def __init__(self, text: str, name: str, numbered: bool = True) -> None:
        """Compose `text`; problems refer to it as `name`, with the line if `numbered`.

        Raises:
            yaml.YAMLError: the text is not YAML.
        """
        self._name = name
        self._numbered = numbered
        self._loader = _Loader(text)
        self.root: yaml.Node | None = self._loader.get_single_node()

    def where(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._numbered else self._name

    def value(self, node: yaml.Node) -> Any:
        """The node as plain Python.

        Raises:
            yaml.YAMLError: the safe loader refuses it.
        """
        return self._loader.construct_object(node, deep=True)

    def entries(self, node: yaml.Node, prefix: str, problems: list[Problem]) -> Iterator[Entry]:
        """The values of a mapping in file order, sections flattened; repeated and impossible keys become problems."""
        if not isinstance(node, yaml.MappingNode):
            yield Entry(key=prefix, value=self.value(node), where=self.where(node))
            return
        self._loader.flatten_mapping(node)
        seen: dict[str, str] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            key = f"{prefix}.{name}" if prefix else name
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                space = " Behind its `:` is a space." if ":" in name else ""
                message = f"a key is made of letters, digits, _ and -.{space}"
                problems.append(Problem(where=where, key=key, message=message))
            elif name in seen:
                problems.append(Problem(where=where, key=key, message=f"given twice, first at {seen[name]}."))
            elif is_section(key) and isinstance(value_node, yaml.MappingNode):
                yield from self.entries(value_node, key, problems)
            else:
                yield Entry(key=key, value=self.value(value_node), where=where)
            seen.setdefault(name, where)


def display_path(path: Path) -> str:
    """The path relative to the working directory if it lies below it, else unchanged."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(path)
