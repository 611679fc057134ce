"""Bugs that are planted into a package by the procedural modifiers of SWE-smith (arXiv:2504.21798)."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.environments.bare_packages import make_bare
from slimrl.environments.software_repair.packages import Package

_BARE = (
    "swesmith",
    "swesmith.bug_gen",
    "swesmith.bug_gen.adapters",
    "swesmith.bug_gen.procedural",
    "swebench",
    "swebench.harness",
)


@dataclass(frozen=True, kw_only=True)
class Bug:
    path: str
    """Path of the changed file, in the base folder"""
    place: str
    """The function or class that was changed: path and first line in the sound file"""
    text: str
    """The file with the bug"""
    modifier: str


def import_parts() -> None:
    """Let the modules be imported that are used here without other languages' parsers, docker, datasets and modal."""
    make_bare(_BARE, "software_repair")


def candidates(package: Package, base: Path, seed: int) -> Iterator[Bug]:
    """Bugs in a random order; whether tests catch them is not known yet."""
    import_parts()
    from swesmith.bug_gen.procedural.python import MODIFIERS_PYTHON

    pairs = [
        (entity, modifier)
        for entity in _entities(package, base)
        for modifier in MODIFIERS_PYTHON
        if modifier.can_change(entity)
    ]
    random.Random(f"{seed} {package.name}").shuffle(pairs)
    for number, (entity, modifier) in enumerate(pairs):
        modifier.rand = random.Random(f"{seed} {package.name} {number}")
        rewrite = modifier.modify(entity)
        if rewrite is None:
            continue
        path = Path(entity.file_path)
        sound = path.read_text()
        text = _with(sound, entity, rewrite.rewrite)
        if text == sound or not compiles(text):
            continue
        relative = path.relative_to(base).as_posix()
        yield Bug(path=relative, place=f"{relative}:{entity.line_start}", text=text, modifier=modifier.name)


def code_files(code: Sequence[str], tests: Sequence[str], base: Path) -> list[Path]:
    """The Python files of the package itself, without its tests."""
    found = [path for name in code for path in ([base / name] if name.endswith(".py") else (base / name).rglob("*.py"))]
    hidden = [base / name for name in tests]
    return sorted(path for path in found if not any(path.is_relative_to(other) for other in hidden))


def _entities(package: Package, base: Path) -> list[Any]:
    from swesmith.bug_gen.adapters.python import get_entities_from_file_py

    found: list[Any] = []
    for path in code_files(package.code, package.tests, base):
        get_entities_from_file_py(found, str(path))
    return found


def _with(sound: str, entity: Any, rewrite: str) -> str:
    """The file with the entity's lines rewritten, at their indentation."""
    indent = " " * (entity.indent_level * entity.indent_size)
    lines = sound.splitlines(keepends=True)
    new = [indent + line if line.strip() else "\n" for line in rewrite.rstrip("\n").splitlines(keepends=True)]
    lines[entity.line_start - 1 : entity.line_end] = [*new, "\n"]
    return "".join(lines)


def compiles(text: str) -> bool:
    """Whether it is a Python file."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
