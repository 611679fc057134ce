"""Recipes, overrides and data lines that somebody else wrote: each is one problem with its line, at once."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from slimrl.base.jsonl import read_jsonl
from slimrl.config.load import load_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.yaml_source import MAX_DEPTH, MAX_VALUES

ROOT = Path(__file__).parents[2]
BASE = f"extends: {ROOT}/recipes/tiny_moe/gspo_calculator.yaml\n"
NINES = "9" * 5000
BEYOND = f"{NINES[:57]}... is beyond an integer of 64 bits."
BOMB = "    a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"    a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 7)
)
MERGED = "    a0: &a0 {k: 1}\n" + "".join(
    f"    a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}], k{level}: 1}}\n" for level in range(1, 7)
)


def refused(path: Path, overrides: list[str] | None = None) -> str:
    started = time.process_time()
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides or [])
    assert time.process_time() - started < 5
    said = str(caught.value)
    assert said.endswith("1 problem. Nothing was started.")
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (f"agent: {{tool_args: {{x: {'[' * 2000}{']' * 2000}}}}}\n", 2, f"nested more than {MAX_DEPTH} deep."),
        ("".join(f"{' ' * depth}k{depth}:\n" for depth in range(1500)), 51, f"nested more than {MAX_DEPTH} deep."),
        ("x: " + "{a: " * 2000, 2, f"nested more than {MAX_DEPTH} deep."),
        (f"seed: {NINES}\n", 2, BEYOND),
        ("seed: 0x" + "f" * 5000, 2, f"0x{'f' * 55}... is beyond an integer of 64 bits."),
        (f"trainer: {{optimizer: {{lr: 1{'0' * 400}}}}}\n", 2, f"1{'0' * 56}... is beyond an integer of 64 bits."),
        ("trainer: {optimizer: {lr: 1e999}}\n", 2, "1e999 is beyond a number of 64 bits."),
        ('model: {path: "a\\0b"}\n', 2, "a text with a NUL character."),
        (f"agent:\n  tool_args:\n{BOMB}", 7, f"more than {MAX_VALUES} values, those that aliases repeat included."),
        (f"agent:\n  tool_args:\n{MERGED}", 8, f"more than {MAX_VALUES} values, those that aliases repeat included."),
        ("agent: {tool_args: &a {x: *a}}\n", 2, "an alias within what it stands for."),
        ("seed: !!timestamp x\n", 2, "'x' is no tag:yaml.org,2002:timestamp."),
        (
            "agent:\n  tool_args: {x: !!timestamp 2020-01-01}\nseed: ${steps}\n",
            3,
            "tag:yaml.org,2002:timestamp is no type of a recipe's values; write a text.",
        ),
        ("agent: {tool_args: {x: .nan}}\n", 2, "agent.tool_args.x: nan: must be a finite number."),
        (
            "agent:\n  environment_args:\n    x: {y: [1, -.inf]}\n",
            3,
            "agent.environment_args: -inf: must be a finite number.",
        ),
        (
            "agent:\n  chat_template_kwargs:\n    x: .inf\n",
            4,
            "agent.chat_template_kwargs.x: inf: must be a finite number.",
        ),
        (
            "reward:\n  parts:\n    x: {function: a.b:c, args: {y: [.nan]}}\n  function: ''\n",
            4,
            "reward.parts.x.args.y: nan: must be a finite number.",
        ),
        (
            "agent:\n  tool_args: {x: [!!set {a}]}\n",
            3,
            "tag:yaml.org,2002:set is no type of a recipe's values; write a text.",
        ),
    ],
)
def test_a_hostile_recipe_is_one_problem_with_its_line(tmp_path: Path, text: str, line: int, problem: str):
    (tmp_path / "r.yaml").write_text(BASE + text)
    assert refused(tmp_path / "r.yaml").startswith(f"{tmp_path / 'r.yaml'}:{line}: {problem}\n")


def test_a_base_with_a_nul_in_its_path_is_refused(tmp_path: Path):
    (tmp_path / "r.yaml").write_text('extends: "a\\0b"\n')
    assert "r.yaml:1: a text with a NUL character." in refused(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (f"seed={NINES}", f"seed: '{NINES[:57]}...': {BEYOND}"),
        (f"agent.tool_args={'[' * 2000}", f"agent.tool_args: '{'[' * 57}...': nested more than {MAX_DEPTH} deep."),
        ("model.path=a\0b", "model.path: 'a\\x00b' is not YAML: character 2 is one that no text has, U+0000"),
        ('model.path="a\\0b"', "model.path: '\"a\\\\0b\"': a text with a NUL character."),
        ("agent.tool_args={a: &a [*a]}", "agent.tool_args: '{a: &a [*a]}': an alias within what it stands for."),
    ],
)
def test_a_hostile_override_is_one_problem(override: str, problem: str):
    said = refused(ROOT / "recipes/tiny_moe/gspo_calculator.yaml", [override])
    assert said.startswith(f"command line: {problem}")


def test_aliases_within_the_bounds_are_read(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(BASE + "agent:\n  tool_args:\n    a: &a [1, [2]]\n    b: [*a, *a]\n")
    assert load_recipe(tmp_path / "r.yaml").recipe.agent.tool_args["b"] == [[1, [2]], [1, [2]]]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (NINES, "an integer has thousands of digits"),
        ("[" * 2000, "nested more than 100 deep"),
        ("[" * 2000 + "]" * 2000, "nested more than 100 deep"),
        ("1e999", "1e999 is too large for a 64-bit float"),
    ],
)
def test_a_hostile_data_line_is_named(tmp_path: Path, value: str, problem: str):
    (tmp_path / "d.jsonl").write_text('{"x": 1}\n{"x": ' + value + "}\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:2: ") as caught:
        read_jsonl(tmp_path / "d.jsonl", lambda line, number: line)
    assert problem in str(caught.value)


def test_many_keys_and_the_last_one_twice_take_no_time(tmp_path: Path):
    keys = [f'"{number}": 0' for number in range(200_000)]
    (tmp_path / "d.jsonl").write_text("{" + ", ".join([*keys, '"199999": 1']) + "}\n")
    started = time.process_time()
    with pytest.raises(ValueError, match="duplicate key 199999"):
        read_jsonl(tmp_path / "d.jsonl", lambda line, number: line)
    assert time.process_time() - started < 10


def test_ordinary_numbers_stay_what_they_are(tmp_path: Path):
    values: dict[str, Any] = {"a": 2**63 - 1, "b": -(2**63), "c": 1e308, "d": 0}
    (tmp_path / "r.yaml").write_text(
        BASE + f"agent: {{tool_args: {json.dumps(values)}}}\n".replace("1e+308", "1.0e+308")
    )
    assert load_recipe(tmp_path / "r.yaml").recipe.agent.tool_args == values
