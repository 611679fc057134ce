"""A thousand mutants of the shipped recipes: each is one RecipeError, or is read as what stands in its text.

What stands there is read once more, without slimrl: by PyYAML's own reader of texts, with the files that are extended
laid under it.
"""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
import types
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from recipe_mutations import Mutant, mutant_of_settings, mutant_of_text

from slimrl.config.keys import flatten, type_of
from slimrl.config.load import LoadedRecipe, intended_command
from slimrl.config.problems import RecipeError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MISSING
from slimrl.models.offline_recipe import read_offline

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = [str(path.relative_to(RECIPES)) for path in sorted(RECIPES.glob("*/*.yaml")) if path.parent.name != "base"]
MUTANTS = 1000
GROUPS = 10
CPU_LIMIT_S = 5.0
"""The most that a mutant may take; a recipe takes 0.03 s."""
LONGEST = 10_000
"""Characters of a refusal; that of an unknown key in every line of a recipe has some thousands"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    shutil.copytree(RECIPES, tmp_path / "recipes")
    return tmp_path / "recipes"


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_mutant_is_one_refusal_or_read_as_what_it_says(recipes: Path, group: int):
    refused = 0
    for number in range(group, MUTANTS, GROUPS):
        mutant, file = write_mutant(recipes, number)
        about = f"mutant {number}, {mutant.kind} of {NAMES[number % len(NAMES)]}, {mutant.key}"
        started = time.process_time()
        try:
            loaded = read_offline(file, [], intended_command(file), model_needed=False).loaded
        except RecipeError as error:
            refused += 1
            assert_names_its_place(error, recipes, about)
        else:
            assert not mutant.refused, f"{about} was accepted"
            assert_reads_as(file, loaded, about)
        assert time.process_time() - started < CPU_LIMIT_S, about
    assert MUTANTS // GROUPS // 2 < refused < MUTANTS // GROUPS, "not all of them may be refused, nor many be read"


def test_mutants_are_refused_by_the_command_as_by_the_function(recipes: Path):
    """What the command prints of ten of them at once, in a process of its own."""
    files = []
    for number in range(len(NAMES), 2 * len(NAMES)):
        mutant, file = write_mutant(recipes, number)
        if mutant.refused:
            files.append(file.rename(file.with_name(f"mutant_{number}.yaml")))
    files = files[:10]
    command = [sys.executable, "-m", "slimrl.cli", "config", "check", *map(str, files)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
    said = done.stdout.decode()
    assert "Traceback" not in said
    assert said.count("Nothing was started.") == len(files) == 10
    assert said.splitlines()[-1] == "10 recipes, 10 refused."


@pytest.mark.parametrize("command", ["train", "sft", "plan", "resync estimate"])
def test_every_command_refuses_a_mutant_with_the_exit_code_of_wrong_input(recipes: Path, command: str):
    file = recipes / "tiny_moe" / "mutant.yaml"
    file.write_bytes(b"extends: gspo_calculator.yaml\nrun:\n  name: \xff\n")
    arguments = [sys.executable, "-m", "slimrl.cli", *command.split(), str(file)]
    done = subprocess.run(arguments, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.decode() == f"{file}:3: not UTF-8.\n1 problem. Nothing was started.\n"


def write_mutant(recipes: Path, number: int) -> tuple[Mutant, Path]:
    """The mutant of this number, and its file beside the recipe that it is made from."""
    rng, original = Random(f"recipe {number}"), recipes / NAMES[number % len(NAMES)]
    by_settings = rng.random() < 0.35
    mutant = mutant_of_settings(rng, original.name) if by_settings else mutant_of_text(rng, original.read_text())
    file = original.with_name("mutant.yaml")
    file.write_bytes(mutant.content)
    return mutant, file


def assert_names_its_place(error: RecipeError, recipes: Path, about: str) -> None:
    """Each problem has the file, or the key of a default, and the whole can be printed."""
    said = str(error)
    said.encode()
    count = sum(problem.count for problem in error.problems)
    assert said.endswith(f"{count} problem{'s' * (count > 1)}. Nothing was started."), about
    assert len(said) < LONGEST, f"{about}: {said[:500]}"
    for problem in error.problems:
        assert str(recipes) in str(problem), f"{about}: {problem}"
        assert problem.message, about
        _, _, line = problem.where.rpartition(":")
        assert problem.key or line.isdigit(), f"{about}: {problem} names neither a line nor a key"


def assert_reads_as(file: Path, loaded: LoadedRecipe, about: str) -> None:
    """Every value of the text is the setting's, and every other setting is as by default."""
    text = stated(file)
    values = {key: value for key, value in flatten(loaded.recipe, loaded.provenance) if value != MISSING}
    default = dict(flatten(Recipe()))
    for key, value in values.items():
        assert fits(type_of(key), value), f"{about}: {key} is {value!r}"
        said = at(text, key.split("."))
        if said is ABSENT:
            shared = values.get(key.removeprefix("critic."))
            known = value in (default.get(key), shared) or key.startswith("algorithm.")
            assert known, f"{about}: {key} is {value!r}, which nobody gave"
        else:
            assert same(said, value), f"{about}: {key} is {value!r}, and the text says {said!r}"
    lost = [key for key in leaves(text) if not any(key == one or key.startswith(f"{one}.") for one in values)]
    assert lost == [], about


ABSENT = object()


def stated(file: Path) -> dict[str, Any]:
    """The values of a recipe as texts in nested mappings, those of the files that it extends first."""
    own = yaml.load(file.read_text(), Loader=yaml.BaseLoader) or {}
    bases = own.pop("extends", [])
    found: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        found = merged(found, stated(file.parent / base))
    return merged(found, own)


WHOLE = ("environment_args", "command_env", "command_task_args")
"""Mappings that a later file replaces"""
REMOVABLE = ("data.eval", "data.more", "data.weights", "reward.parts")
"""Sections from which a null takes an entry out"""


def merged(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result = dict(one)
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(result.get(name, {}), dict) and name not in WHOLE:
            result[name] = merged(result.get(name, {}), value, f"{prefix}{name}.")
        elif prefix.removesuffix(".") in REMOVABLE and value in ("", "null", "~"):
            del result[name]
        else:
            result[name] = value
    return result


def at(tree: Any, path: list[str]) -> Any:
    for place, name in enumerate(path):
        if not isinstance(tree, dict):
            return ABSENT
        rest = ".".join(path[place:])
        if rest in tree:
            return tree[rest]
        tree = tree.get(name, ABSENT)
    return tree


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found += leaves(value, f"{key}.") if isinstance(value, dict) else [key]
    return found


def same(said: Any, value: Any) -> bool:
    """Whether a text is how a recipe writes a value."""
    value = value.value if isinstance(value, Enum) else value
    if isinstance(said, str) and "${" in said:
        return True
    if isinstance(said, dict):
        if dataclasses.is_dataclass(value):
            value = vars(value)
        return isinstance(value, dict) and (
            {*said} == {*map(plain, value)} and all(same(said[plain(key)], one) for key, one in value.items())
        )
    if isinstance(said, list):
        return isinstance(value, list) and len(said) == len(value) and all(map(same, said, value))
    if isinstance(value, bool):
        return said.lower() == json.dumps(value)
    if isinstance(value, int):
        return int(said, 0 if said[:2] in ("0x", "0o") else 10) == value
    if isinstance(value, float):
        return float(said) == value
    if value is None:
        return said.lower() in ("", "~", "null")
    return isinstance(value, str) and (said == value or is_number(said, value))


def is_number(said: str, value: str) -> bool:
    """A number where a text is wanted, `.5`, is the text of the number."""
    try:
        return float(said) == float(value)
    except ValueError:
        return False


def plain(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key)


def fits(kind: Any, value: Any) -> bool:
    """Whether a value is of an annotated type, and finite."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(one, value) for one in arguments)
    if hasattr(kind, "__metadata__"):
        return fits(kind.__origin__, value)
    if origin is list:
        return isinstance(value, list) and all(fits(arguments[0], one) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(arguments[1], one) for one in value.values())
    if kind in (int, float):
        numbers = (int, float) if kind is float else int
        return isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)
