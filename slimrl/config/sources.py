"""The sources of a recipe's values: its file, the files that it extends, and the overrides of the command line."""

import re
import stat
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import yaml

from slimrl.config.keys import EXTENDS, is_section
from slimrl.config.problems import Problem
from slimrl.config.yaml_source import Entry, Refused, YamlSource, display_path

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
    try:
        source = YamlSource(_text_of_pipe(path, path.stat().st_ino) if is_pipe(path) else path.read_text(), shown)
        root = source.root
        if root is not None and not isinstance(root, yaml.MappingNode):
            problems.append(
                Problem(where=source.where(root), key="", message="a recipe is a mapping of keys to values.")
            )
            return
        entries = [] if root is None else list(source.entries(root, "", problems))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, IsADirectoryError) and (recipe := path / "config.yaml").is_file():
            reason = f"a run folder, whose recipe is {display_path(recipe)}"
        problems.append(Problem(where=referrer, key=EXTENDS if referrer else "", message=f"{shown}: {reason}."))
        return
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        problems.append(Problem(where=where, key="", message=f"{_reason(error)}."))
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


@cache
def _text_of_pipe(path: Path, inode: int) -> str:
    """Kept, since a command looks at its recipe more than once."""
    return path.read_text()


def read_overrides(overrides: Sequence[str], problems: list[Problem]) -> Iterator[Entry]:
    """Entries of each `key=value`; several where the value is a mapping. Problems are appended."""
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            message = "an override is written key=value."
            problems.append(Problem(where=COMMAND_LINE, key=override, message=message))
            continue
        try:
            source = YamlSource(text, COMMAND_LINE, numbered=False)
            if source.root is None:
                yield Entry(key=key, value="", where=COMMAND_LINE)
            elif is_section(key):
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
