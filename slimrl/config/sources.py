"""The texts that a recipe is made of: its file, the files that it extends, and the command line's overrides."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from slimrl.config.keys import EXTENDS, is_section
from slimrl.config.problems import Problem
from slimrl.config.yaml_source import Entry, YamlSource, display_path

COMMAND_LINE = "command line"


def read_file(path: Path, chain: tuple[Path, ...], referrer: str, problems: list[Problem]) -> Iterator[Entry]:
    """Entries of a file, those that it inherits first.

    Args:
        path: the file.
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
        source = YamlSource(path.read_text(), shown)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(Problem(where=referrer, key=EXTENDS if referrer else "", message=f"{shown}: {reason}."))
        return
    except yaml.YAMLError as error:
        problems.append(_yaml_problem(error, shown))
        return
    if source.root is None:
        return
    if not isinstance(source.root, yaml.MappingNode):
        problems.append(
            Problem(where=source.where(source.root), key="", message="a recipe is a mapping of keys to values.")
        )
        return
    try:
        entries, found = source.entries(source.root, "", is_section)
    except yaml.YAMLError as error:
        problems.append(_yaml_problem(error, shown))
        return
    problems += found
    for entry in entries:
        if entry.key == EXTENDS:
            bases = entry.value if isinstance(entry.value, list) else [entry.value]
            for base in bases:
                if isinstance(base, str):
                    yield from read_file(path.parent / base, (*chain, resolved), entry.where, problems)
                else:
                    problems.append(Problem(where=entry.where, key=EXTENDS, message=f"expected a path, got {base!r}."))
    yield from (entry for entry in entries if entry.key != EXTENDS)


def _yaml_problem(error: yaml.YAMLError, shown: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{shown}:{mark.line + 1}" if mark else shown
    return Problem(where=where, key="", message=f"not YAML: {getattr(error, 'problem', None) or error}.")


def read_override(override: str, problems: list[Problem]) -> list[Entry]:
    """Entries of one `key=value`; several where the value is a mapping. Problems are appended."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        problems.append(Problem(where=COMMAND_LINE, key=override, message="an override is written key=value."))
        return []
    try:
        source = YamlSource(text, COMMAND_LINE, numbered=False)
        if source.root is None:
            return [Entry(key=key, value="", where=COMMAND_LINE)]
        if not is_section(key):
            return [Entry(key=key, value=source.value(source.root), where=COMMAND_LINE)]
        entries, found = source.entries(source.root, key, is_section)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or error
        problems.append(Problem(where=COMMAND_LINE, key=key, message=f"{text!r} is not YAML: {reason}."))
        return []
    problems += found
    return entries
