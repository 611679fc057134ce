"""Faults to plant: each replaces one text in one named definition, so that a table of them survives moved lines.

A table is YAML, a list of faults with the fields of `Fault`. The module tells which package's tests have to notice the
fault; where the module has moved, the definition is looked for in all others.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import yaml

SOURCES = {"slimrl": "slimrl", "slimrl_tools": "tools", "megatron_patches": "megatron_patches"}
"""Top-level module -> its folder in the repository."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    """What goes wrong, in a few words; names the fault."""
    module: str
    """Dotted name, for example `slimrl.runtime.learner`."""
    where: str = ""
    """Qualified name of the class, method or function that holds `old`; empty for the whole module."""
    old: str
    """Stands there exactly once."""
    new: str

    @property
    def package(self) -> str:
        """The module's package: `slimrl.runtime`, `slimrl_tools`, `megatron_patches`."""
        top, *rest = self.module.split(".")
        return f"{top}.{rest[0]}" if top == "slimrl" else top


def read_table(path: Path) -> list[Fault]:
    return [Fault(**row) for row in yaml.safe_load(path.read_text())]


def planted(root: Path, fault: Fault) -> tuple[Path, str]:
    """The file that the fault changes and its text with the fault.

    Raises:
        ValueError: the old text is not there, or stands in several places.
    """
    top, *rest = fault.module.split(".")
    folder = root / SOURCES[top]
    named = [path for path in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py"))]
    files = [path for path in named if path.is_file()] or sorted(folder.rglob("*.py"))
    found = [(path, text) for path in files for text in _replacements(path.read_text(), fault)]
    if len(found) != 1:
        raise ValueError(f"{fault.what}: its old text stands {len(found)} times in {fault.module} {fault.where}")
    ast.parse(found[0][1])
    return found[0]


def _replacements(source: str, fault: Fault) -> Iterator[str]:
    """The source with the old text replaced, once for each place where it stands within the named definition."""
    for begin, end in _spans(source, fault.where):
        position = source.find(fault.old, begin, end)
        while position >= 0:
            yield source[:position] + fault.new + source[position + len(fault.old) :]
            position = source.find(fault.old, position + 1, end)


def _spans(source: str, where: str) -> Iterator[tuple[int, int]]:
    """Begin and end, in characters, of each definition of that qualified name."""
    if not where:
        yield 0, len(source)
        return
    starts = list(accumulate((len(line) + 1 for line in source.split("\n")), initial=0))
    for name, node in _definitions(ast.parse(source), ""):
        if name == where:
            assert node.end_lineno is not None
            yield starts[node.lineno - 1], starts[node.end_lineno]


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)
