"""Docstrings say what the thing is, in a phrase that stands alone: none begins with "Of", as of a thing left unsaid."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("slimrl", "tools", "megatron_patches", "tests", "benchmarks")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that stands alone as a statement: docstrings, also those below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_of_all_kinds_are_found():
    source = '''"""Of a module."""
SIZE = 1
"""Of a constant."""
class A:
    """Of a class."""
    size: int
    """
    Of an attribute."""
    async def f(self):
        """Of a function."""
        self.size = "Of no docstring."
        """Of an instance."""
'''
    assert sorted(docstrings(source)) == [
        (1, "Of a module."),
        (3, "Of a constant."),
        (5, "Of a class."),
        (7, "Of an attribute."),
        (10, "Of a function."),
        (12, "Of an instance."),
    ]


def test_no_docstring_begins_with_of():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in files} == set(FOLDERS)
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in docstrings(path.read_text())
        if text.startswith("Of ")
    ]
    assert not fragments, "say what it is, as in 'Size of a version' for 'Of a version':\n" + "\n".join(fragments)
