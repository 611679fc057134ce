"""The direction of imports, read from the source: who may know whom."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAVES = {"base", "config", "data"}
"""All of slimrl but these may import these."""

MAY_IMPORT = {
    "base": set(),
    "config": {"base"},
    "data": {"base", "config"},
    "device": LEAVES,
    "algorithms": LEAVES,
    "agent": LEAVES,
    "environments": {*LEAVES, "agent"},
    "rewards": {*LEAVES, "agent"},
    "observability": LEAVES,
    "megatron_patches": {*LEAVES, "device"},
    "models": LEAVES,
    "quantization": {*LEAVES, "models"},
    "checkpoints": {*LEAVES, "models", "quantization"},
    "toys": {*LEAVES, "models", "checkpoints"},
    "evaluation": {*LEAVES, "observability"},
    "resync": {*LEAVES, "device", "models", "quantization", "checkpoints"},
    "trainer": {*LEAVES, "device", "algorithms", "models", "quantization", "checkpoints", "megatron_patches"},
    "engines": {*LEAVES, "device", "models", "quantization", "checkpoints", "resync"},
    "rollout": {
        *LEAVES, "device", "algorithms", "agent", "environments", "rewards", "observability", "models", "checkpoints",
        "evaluation", "resync", "engines",
    },
    "runtime": {
        *LEAVES, "device", "algorithms", "agent", "rewards", "observability", "models", "quantization", "checkpoints",
        "toys", "evaluation", "resync", "trainer", "engines", "rollout",
    },
    "estimates": {
        *LEAVES, "algorithms", "models", "observability", "quantization", "checkpoints", "trainer", "resync",
        "rollout", "runtime",
    },
    "launch": {*LEAVES, "device", "models", "observability", "runtime"},
    "api": {*LEAVES, "agent", "rewards", "algorithms"},
}  # fmt: skip
"""Part -> the other parts that it may import. cli may import all but api; slimrl_tools too, except cli and runtime."""

LIGHT = {"base", "config", "data", "algorithms"}
"""Parts that import neither ray, megatron nor sglang."""


def python_files(part: str) -> list[Path]:
    folder = ROOT / ("megatron_patches" if part == "megatron_patches" else f"slimrl/{part}")
    return (
        sorted(folder.rglob("*.py"))
        if folder.is_dir()
        else [path for path in [folder.with_suffix(".py")] if path.exists()]
    )


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports anywhere in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(path: Path) -> set[str]:
    parts = set()
    for name in imported_modules(path):
        top, *rest = name.split(".")
        if top == "slimrl" and rest:
            parts.add(rest[0])
        elif top in ("megatron_patches", "slimrl_tools"):
            parts.add(top)
    return parts


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_go_down_only(part):
    wrong = {
        str(path.relative_to(ROOT)): sorted(unknown)
        for path in python_files(part)
        if (unknown := parts_imported(path) - MAY_IMPORT[part] - {part})
    }
    assert wrong == {}


@pytest.mark.parametrize("part", sorted(LIGHT))
def test_light_parts_import_neither_ray_nor_megatron_nor_sglang(part):
    heavy = {
        str(path.relative_to(ROOT)): name
        for path in python_files(part)
        for name in imported_modules(path)
        if name.split(".")[0] in ("ray", "megatron", "sglang")
    }
    assert heavy == {}


def test_the_driver_imports_no_megatron():
    """Importing it patches torch, and takes long; only the ranks' processes pay for that."""
    wrong = {
        str(path.relative_to(ROOT)): name
        for path in python_files("runtime")
        for name in imported_at_once(path)
        if name.startswith(("megatron", "slimrl.trainer"))
    }
    assert wrong == {}


def imported_at_once(path: Path) -> Iterator[str]:
    """Dotted names of what an import of the file imports, apart from what its own functions and conditions import."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_of_the_package_has_a_rule():
    parts = {
        path.stem for path in (ROOT / "slimrl").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__", "__main__", "cli"} <= set(MAY_IMPORT)


def test_nothing_imports_the_command_line_and_tools_leave_the_runtime_alone():
    for part in MAY_IMPORT:
        assert all("cli" not in parts_imported(path) for path in python_files(part))
    for path in sorted((ROOT / "tools").rglob("*.py")):
        assert not parts_imported(path) & {"cli", "runtime"}, path


def test_nothing_imports_what_is_there_for_tasks():
    files = [file for folder in ("slimrl", "tools", "megatron_patches") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert [str(path.relative_to(ROOT)) for path in files if "api" in parts_imported(path)] == []


def test_the_training_framework_around_megatron_core_is_never_imported():
    for path in [*(ROOT / "slimrl").rglob("*.py"), *(ROOT / "megatron_patches").rglob("*.py")]:
        assert not any(name.startswith("megatron.training") for name in imported_modules(path)), path


def test_what_tests_import_is_there_also_where_only_some_machines_run_them():
    folders = {"slimrl": ROOT / "slimrl", "slimrl_tools": ROOT / "tools", "megatron_patches": ROOT / "megatron_patches"}
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            top, *rest = (node.module or "").split(".")
            if top in folders:
                module = folders[top].joinpath(*rest)
                wrong += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if alias.name not in globals_of(module) and not exists(module / alias.name)
                ]
    assert wrong == []


def exists(module: Path) -> bool:
    return module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()


@functools.cache
def globals_of(module: Path) -> set[str]:
    """Names that a module, given without its suffix, gives to something, wherever in it; none if there is no such
    module."""
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    names = set()
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
