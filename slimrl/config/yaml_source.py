"""The sources of a recipe's values: its file, the files that it extends, and the overrides of the command line.

A YAML document becomes a flat list of values, each with its key and its line. Scalars follow the YAML 1.2 core rules,
so that `off` is a word and `1e-6` a number.
"""

import errno
import math
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from slimrl.config.elsewhere import is_section_elsewhere
from slimrl.config.keys import EXTENDS, is_known, is_removable, is_section
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


_SURROGATE = re.compile("[\ud800-\udfff]")
"""What an escape in double quotes may write, and no file can hold"""


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
        if isinstance(value, str) and _SURROGATE.search(value):
            raise _wrong("a text with half of a surrogate pair", node.start_mark)
        if not isinstance(value, str | int | float | list | dict | None):
            raise _wrong(f"{node.tag} is no type of a recipe's values; write a text", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise _wrong(f"{_short(key.value)!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


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
            elif _holds_entries(key, value_node):
                inside = list(self.entries(value_node, key, problems))
                if not inside and is_removable(key):
                    message = "has no settings, so it would not be there. Give one, or leave it out."
                    problems.append(Problem(where=where, key=key, message=message))
                yield from inside
            else:
                yield Entry(key=key, value=self.value(value_node), where=where)
            seen.setdefault(name, where)


def _holds_entries(key: str, node: yaml.Node) -> bool:
    """Whether what stands below a key are entries of their own: of a section, or of one of verl's, each key of which
    is told where it stands here."""
    if not isinstance(node, yaml.MappingNode):
        return False
    return is_section(key) or (bool(node.value) and not is_known(key) and is_section_elsewhere(key))


def display_path(path: Path) -> str:
    """The path relative to the working directory if it lies below it, else unchanged."""
    resolved = path.resolve()
    return str(resolved.relative_to(Path.cwd())) if resolved.is_relative_to(Path.cwd()) else str(path)


COMMAND_LINE = "command line"


def read_file(path: Path, chain: tuple[Path, ...], referrer: str, problems: list[Problem]) -> Iterator[Entry]:
    """Entries of a file, those that it inherits first.

    Args:
        path: a pipe is read once in a process, and what it extends is relative to the working directory.
        chain: resolved paths of the files that led here by `extends`.
        referrer: `file:line` of the `extends` that named it; empty for the recipe itself.
        problems: what is wrong is appended here.
    """
    shown = display_path(path)
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(display_path(link) for link in (*chain[chain.index(resolved) :], resolved))
        problems.append(Problem(where=referrer, key=EXTENDS, message=f"{names} is a cycle."))
        return
    text = ""
    try:
        text = _text_of_pipe(path, path.stat().st_ino) if is_pipe(path) else _text_of_file(path)
        source = YamlSource(text, shown)
        root = source.root
        if root is not None and not isinstance(root, yaml.MappingNode):
            problems.append(
                Problem(where=source.where(root), key="", message="a recipe is a mapping of keys to values.")
            )
            return
        entries = [] if root is None else list(source.entries(root, "", problems))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problems.append(Problem(where=f"{shown}:{line}", key="", message="not UTF-8."))
        return
    except OSError as error:
        reason = error.strerror
        if isinstance(error, IsADirectoryError) and (recipe := path / "config.yaml").is_file():
            reason = f"a run folder, whose recipe is {display_path(recipe)}"
        problems.append(Problem(where=referrer, key=EXTENDS if referrer else "", message=f"{shown}: {reason}."))
        return
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", None))
        problems.append(Problem(where=f"{shown}:{line + 1}", key="", message=f"{_reason(error)}."))
        return
    for entry in entries:
        if entry.key == EXTENDS:
            for base in entry.value if isinstance(entry.value, list) else [entry.value]:
                if isinstance(base, str):
                    folder = Path() if is_pipe(path) else path.parent
                    yield from read_file(folder / base, (*chain, resolved), entry.where, problems)
                else:
                    problems.append(entry.problem(f"expected a path, got {base!r}."))
    yield from (entry for entry in entries if entry.key != EXTENDS)


def is_pipe(path: Path) -> bool:
    """Whether a recipe comes from a pipe, such as `<(COMMAND)` of a shell, and so can be read once."""
    return path.exists() and stat.S_ISFIFO(path.stat().st_mode)


def _text_of_file(path: Path) -> str:
    """The text of a regular file: a device such as /dev/zero may have no end.

    Raises:
        OSError: there is none, or it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "neither a file nor a pipe", str(path))
    return path.read_bytes().decode()


@cache
def _text_of_pipe(path: Path, inode: int) -> str:
    """Kept, since a command looks at its recipe more than once."""
    return path.read_bytes().decode()


def read_overrides(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Entry]:
    """Entries of each `key=value`; several where the value is a mapping. Problems are appended."""
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if key.startswith("~"):
            plain = key.lstrip("~")
            instead = f"{plain}=null removes it" if is_removable(plain) else "give the setting another value"
            message = f"the ~ is Hydra's: {instead}."
            problems.append(Problem(where=COMMAND_LINE, key=key, message=message))
            continue
        if key.startswith("+"):
            plain = key.lstrip("+")
            message = f"the + is Hydra's. Leave it away: {plain}=VALUE adds as well as replaces."
            problems.append(Problem(where=COMMAND_LINE, key=key, message=message))
            key = plain
        if not equals or not key:
            message = "an override is written key=value."
            problems.append(Problem(where=COMMAND_LINE, key=override, message=message))
            continue
        try:
            source = YamlSource(text, COMMAND_LINE, numbered=False)
            if source.root is None:
                yield Entry(key=key, value="", where=COMMAND_LINE)
            elif _holds_entries(key, source.root):
                yield from list(source.entries(source.root, key, problems))
            else:
                yield Entry(key=key, value=source.value(source.root), where=COMMAND_LINE)
        except yaml.YAMLError as error:
            given = text if len(text) <= 60 else f"{text[:57]}..."
            message = f"{given!r}{': ' if isinstance(error, Refused) else ' is '}{_reason(error)}."
            problems.append(Problem(where=COMMAND_LINE, key=key, message=message))


IN_WORDS = {
    r"found character '\\t' that cannot start any token": "a tab; indent with spaces",
    r"found character '(.)' that cannot start any token": r"a value cannot begin with \1; write it in quotes",
    r"mapping values are not allowed here": "a second `: ` on a line, a line that is indented too far, or one above it "
    "without a space behind its `:`; a text with `: ` in it stands in quotes",
    r"sequence entries are not allowed here": "a `- ` of a list stands at the beginning of a line",
    r"second occurrence": "an anchor that is given twice",
    r"could not find expected ':'": "a line before this one is no `key: value`, with a space behind the `:`",
    r"expected <block end>, but found.*": "a line that is indented otherwise than those of its section, or text behind "
    "a value in quotes",
    r"expected ',' or '\]', but got .*": "a list that begins with [ needs commas between its values and a ] at its end",
    r"expected ',' or '}', but got .*": "a mapping that begins with { needs commas between its keys and a } at its end",
    r"found unexpected end of stream": "a quote that is not closed",
    r"found unknown escape character .*": "a backslash in double quotes begins an escape; use single quotes",
    r"found undefined alias .*": "a value cannot begin with * unless that names an anchor; write it in quotes",
    r"could not determine a constructor for the tag .*": "a value cannot begin with !; write it in quotes",
    r"but found another document": "a second document, which --- begins; a recipe is one",
}
"""What PyYAML says -> what its user should read"""


def _reason(error: yaml.YAMLError) -> str:
    reason = str(getattr(error, "problem", None) or error)
    if isinstance(error, Refused):
        return reason
    if isinstance(error, yaml.reader.ReaderError):
        return f"not YAML: character {error.position + 1} is one that no text has, U+{error.character:04X}"
    for said, words in IN_WORDS.items():
        if found := re.fullmatch(said, reason):
            return f"not YAML: {found.expand(words)}"
    return f"not YAML: {reason}"
