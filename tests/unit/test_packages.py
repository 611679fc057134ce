"""pyproject.toml names every package, without which an installed slimrl would lack it."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_of_the_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(file.parent.relative_to(ROOT)).replace("/", ".") for file in (ROOT / "slimrl").rglob("__init__.py")}
    named = {name for name in settings["packages"] if name.split(".")[0] == "slimrl"}
    assert named == folders


def test_files_of_tests_have_names_of_their_own():
    names = [file.name for file in (ROOT / "tests").glob("*/test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
