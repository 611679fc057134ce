"""slimrl.api has all that a task imports: pages, examples and written files import nothing else of slimrl."""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimrl import api

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])

ON_INTERNALS = {"docs/adding_a_model.md": "a family of models is a file and a row inside slimrl"}
"""Pages whose Python becomes a part of slimrl -> why"""
READY_MADE = {"slimrl.rewards.math"}
"""Modules whose import paths recipes name, and which are stable too"""
OWN_PROCESSES = {"slimrl/agent/sandbox/bwrap.py": "starts slimrl's own interpreter of the sandbox"}
"""Files of slimrl that hold Python as text which no user copies -> what for"""

SECTION = "## What a task imports\n"
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "httpx")


def imports(source: str) -> set[str]:
    """Modules of slimrl that Python imports, and names that it imports from slimrl.api in vain."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
            found |= {f"{module}.{name}" for name in names - set(api.__all__)} if module == "slimrl.api" else set()
            found |= {f"slimrl.{name}" for name in names} if module == "slimrl" else {module}
    return {name for name in found if name.split(".")[0] in ("slimrl", "slimrl_tools", "megatron_patches")}


def mentioned(text: str) -> set[str]:
    """The same of text that is not Python alone, such as a command or a template."""
    lines = re.findall(r"^.*\b(?:import|from) +slimrl.*$", text, re.MULTILINE)
    statements = [re.search(r"(?:from|import) +(slimrl[\w.]*)(?: +import +(\w+))?", line) for line in lines]
    return {
        f"slimrl.{each[2]}" if each[1] == "slimrl" and each[2] else each[1] for each in statements if each is not None
    }


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def imported_by_page(page: Path) -> set[str]:
    return {
        name for language, text in blocks(page) for name in (imports(text) if language == "python" else mentioned(text))
    } - READY_MADE


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a Python file that are no docstrings."""
    tree = ast.parse(path.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def groups() -> dict[str, list[str]]:
    """Comment -> names below it, in the source of `__all__`."""
    found: dict[str, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(api)).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            found[token.string.removeprefix("# ")] = []
        elif token.type == tokenize.STRING and found:
            found[list(found)[-1]].append(ast.literal_eval(token.string))
    return found


def docstring(name: str) -> str:
    """That of the source: dataclasses and exceptions have others of their own."""
    (node,) = ast.parse(inspect.getsource(getattr(api, name))).body
    return ast.get_docstring(node) or ""


def table() -> str:
    """The table of the page, from the names' groups and the first lines of their docstrings."""
    rows = ["| for | name | |", "|---|---|---|"]
    for group, names in groups().items():
        firsts = [f"| `{name}` | {docstring(name).splitlines()[0]} |" for name in names]
        rows += [f"| {group} {firsts[0]}", *(f"| {first}" for first in firsts[1:])]
    return "\n".join(rows) + "\n"


def test_the_groups_have_every_name_once():
    assert [name for names in groups().values() for name in names] == api.__all__
    assert len(set(api.__all__)) == len(api.__all__)
    public = {name for name, value in vars(api).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(api.__all__)


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_has_a_docstring(name):
    assert docstring(name)


def test_the_page_lists_every_name_with_its_first_line():
    section = (DOCS / "new_task.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    assert section.partition("\n| ")[1] + section.partition("\n| ")[2] == "\n" + table(), f"it should be:\n{table()}"


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_is_used_or_described_beside_the_list(name):
    described = re.compile(rf"`{name}\b")
    for page in PAGES:
        text = page.read_text()
        if page.name == "new_task.md":
            before, _, after = text.partition(SECTION)
            text = before + (re.split("(?m)^## ", after, maxsplit=1)[1:] or [""])[0]
        python = "\n".join(block for language, block in blocks(page) if language == "python")
        if described.search(text) or re.search(rf"\b{name}\b", python):
            return
    pytest.fail(f"no page says what {name} is")


def test_pages_import_nothing_else_of_slimrl():
    found = {str(page.relative_to(ROOT)): imported_by_page(page) - {"slimrl.api"} for page in PAGES}
    assert {page: names for page, names in found.items() if names and page not in ON_INTERNALS} == {}
    # One that no longer imports internals is no exception any more.
    assert {page for page in ON_INTERNALS if not found[page]} == set()
    assert sum("slimrl.api" in imported_by_page(page) for page in PAGES) >= 5


def test_pages_name_the_module_of_none_of_these_names_but_slimrl_api():
    homes = {node.module for node in ast.parse(inspect.getsource(api)).body if isinstance(node, ast.ImportFrom)}
    wrong = {(page.name, home) for page in PAGES for home in homes if f"`{home}`" in page.read_text()}
    assert wrong == set()


def test_files_that_users_copy_import_nothing_else_of_slimrl():
    files = [*(DOCS / "examples").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]
    assert len(files) >= 4
    assert {str(path) for path in files if imports(path.read_text()) - {"slimrl.api"}} == set()
    recipes = [*(ROOT / "recipes").rglob("*.yaml")]
    assert {str(path) for path in recipes if mentioned(path.read_text()) - {"slimrl.api"}} == set()


def test_what_commands_print_and_write_imports_nothing_else_of_slimrl():
    found = {
        str(path.relative_to(ROOT)): names
        for folder in ("slimrl", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := {name for text in texts_of(path) for name in mentioned(text)} - {"slimrl.api"})
    }
    assert found.keys() == OWN_PROCESSES.keys()


def test_the_module_imports_none_of_the_heavy_packages():
    code = f"import sys, slimrl.api; print([name for name in {HEAVY} if name in sys.modules])"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
