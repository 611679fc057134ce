"""What pages of docs/ say of the same thing is the same, and of the source what is there."""

import ast
import re
from pathlib import Path

from slimrl.toys import toy_configs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_both_pages_give_a_gpu_the_same_memory():
    recipes, plan = ((DOCS / name).read_text() for name in ("recipes.md", "plan_and_simulate.md"))
    in_recipes = {gpu: int(gib) for gib, gpu in re.findall(r"(\d+) (?:GiB )?of an? ([HB]\d+)", recipes)}
    options = next(line for line in plan.splitlines() if "--gpu-memory-gib" in line)
    in_plan = {gpu: int(gib) for gpu, gib in re.findall(r"([HB]\d+) (\d+)", options)}
    assert in_recipes.keys() == {"H200", "B200"}
    assert in_recipes.items() <= in_plan.items()


def test_a_family_s_toy_goes_to_the_file_that_has_the_table():
    (named,) = re.findall(r"Add a toy to the table of `([\w/.]+)`", (DOCS / "adding_a_model.md").read_text())
    assert (ROOT / named).samefile(toy_configs.__file__)


def test_the_page_of_the_architecture_lists_every_package():
    listed = set(re.findall(r"^\| `([\w/.]+)`", (DOCS / "architecture.md").read_text(), re.MULTILINE))
    packages = {f"slimrl/{path.parent.name}" for path in (ROOT / "slimrl").glob("*/__init__.py")}
    assert listed == packages | {"slimrl/api.py", "slimrl/device.py", "megatron_patches", "tools"}


def test_headings_to_which_pages_link_are_there():
    pages = {page.resolve(): page.read_text() for page in (*DOCS.glob("*.md"), ROOT / "README.md")}
    found, dead = 0, []
    for page, text in pages.items():
        for file, anchor in re.findall(r"\]\(([\w/.-]*)#([^)\s]+)\)", text):
            target = (page.parent / file).resolve() if file else page
            found += 1
            if anchor not in anchors(pages.get(target, "")):
                dead.append(f"{page.name}: {file}#{anchor}")
    assert found > 50
    assert dead == []


def test_pages_that_files_of_the_project_name_are_there():
    """Links of pages without a heading, and pages named in code, recipes and scripts, with a heading or without."""
    folders = ("slimrl", "tools", "tests", "megatron_patches", "benchmarks", "recipes", "docs", "docker", "launch")
    kinds = {".py", ".yaml", ".md", ".sh", ".sbatch", ""}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")]
    found, missing = 0, []
    for path in filter(Path.is_file, files):
        text = path.read_text()
        named = re.findall(r"\bdocs/(\w+\.md)(?:#([\w-]+))?", text)
        if path.parent == DOCS:
            named += [(page, "") for page in re.findall(r"\]\((\w+\.md)\)", text)]
        for page, anchor in named:
            found += 1
            if not (DOCS / page).exists() or (anchor and anchor not in anchors((DOCS / page).read_text())):
                missing.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")
    assert found > 200
    assert missing == []


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_import_paths_that_pages_and_recipes_name_are_there():
    files = [*DOCS.glob("*.md"), *(ROOT / "recipes").rglob("*.yaml")]
    named = {path for file in files for path in re.findall(r"\bslimrl(?:\.\w+)+:\w+", file.read_text())}
    assert len(named) > 25
    assert {path for path in named if path.partition(":")[2] not in defined_in(path.partition(":")[0])} == set()


def defined_in(module: str) -> set[str]:
    """Functions and classes that a module defines; none if there is no such module."""
    file = ROOT / (module.replace(".", "/") + ".py")
    nodes = ast.parse(file.read_text()).body if file.is_file() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def test_files_of_the_source_that_pages_name_are_there():
    named = {
        (page.name, path)
        for page in DOCS.glob("*.md")
        for path in re.findall(
            r"`((?:slimrl|tests|tools|benchmarks|recipes)/[\w/.]+\.(?:py|yaml|json))`", page.read_text()
        )
    }
    assert len(named) > 20
    assert {(page, path) for page, path in named if not (ROOT / path).exists()} == set()
