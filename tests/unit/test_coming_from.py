"""docs/coming_from_slime_and_verl.md names settings, defaults and commands as they are, and agrees with the hints."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from page_names import code_of, command_problem, commands_of, is_default, is_setting, refused_values, settings_of

from slimrl.config.elsewhere import Elsewhere, table
from slimrl.config.keys import is_known
from slimrl.config.load import read_recipe

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen3_moe" / "qwen3_30b_a3b_gspo.yaml"
PAGE = (ROOT / "docs" / "coming_from_slime_and_verl.md").read_text()


class Row(NamedTuple):
    theirs: list[str]
    ours: str
    differs: str


def rows(program: str) -> list[Row]:
    """The rows of all tables whose first column is the program's."""
    tables = re.findall(rf"^\| {program} \| slimrl \| what differs \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M)
    cells = [line.strip("|").split(" | ") for table in tables for line in table.splitlines()]
    return [Row(code_of(theirs), ours.strip(), differs.strip(" |")) for theirs, ours, differs in cells]


ROWS = {program: rows(program) for program in ("slime", "verl")}
THEIRS = {program: [name for row in table for name in row.theirs] for program, table in ROWS.items()}
ALL = [row for table in ROWS.values() for row in table]


def test_it_has_the_names_of_both_and_each_once():
    assert all(re.fullmatch(r"--[a-z0-9-]+", name) for name in THEIRS["slime"])
    assert all(re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", name) for name in THEIRS["verl"])
    for names in THEIRS.values():
        assert len(names) > 120
        assert len(set(names)) == len(names)


def test_each_row_names_a_setting_or_a_command_of_ours_or_says_that_there_is_none():
    for row in ALL:
        named = [
            *settings_of(row.ours),
            *[word for word in code_of(row.ours) if word in ("steps", "seed", "deterministic")],
        ]
        assert (row.ours == "none") != bool(named or commands_of(row.ours)), row


def test_every_setting_on_the_page_exists_and_takes_its_value():
    named = {(key, value) for key, value in settings_of(PAGE) if key not in THEIRS["verl"] or (key, value) in OURS}
    assert len(named) > 150
    assert [key for key, _ in named if not is_setting(key)] == []
    assert refused_values(named) == []


OURS = {setting for row in ALL for setting in settings_of(row.ours)}


def test_defaults_on_the_page_are_those_of_the_schema():
    found = re.findall(r"`([\w.]+)` \(default ([^()]+)\)", PAGE)
    assert len(found) > 80
    assert [(key, text) for key, text in found if not is_default(key, text)] == []


def test_every_command_on_the_page_exists():
    lines = commands_of(PAGE)
    assert len(lines) > 15
    assert [problem for line in lines if (problem := command_problem(line))] == []


def test_the_table_that_hints_are_read_from_has_the_rows_of_the_page():
    in_table = {
        program: [Row([*r.theirs], r.ours, r.differs) for r in table() if r.program == program] for program in ROWS
    }
    assert in_table == ROWS, "change slimrl/config/elsewhere.tsv with the page"


NAMES = [(name, row) for row in table() for name in row.theirs]


@pytest.mark.parametrize(("name", "row"), NAMES, ids=[name for name, _ in NAMES])
def test_what_a_recipe_is_told_of_a_name_of_theirs_is_what_the_page_says(name: str, row: Elsewhere):
    key = name.removeprefix("--").replace("-", "_")
    if is_known(key):
        assert key in row.counterparts
        return
    _, problems = read_recipe(RECIPE, [f"{key}=1"])
    (message,) = [problem.message for problem in problems if problem.key == key]
    if row.counterparts:
        meant = re.findall(r"Did you mean (.+?)\?(?: |$)", message)[0].removeprefix("critic.")
        first = re.split(r"[: ]", meant)[0]
        assert first == "slimrl" or {first, f"critic.{first}"} & {*row.counterparts}, message
    else:
        assert message.startswith(f"no such key. It is {row.program}'s and has no counterpart.")


def test_values_of_theirs_are_values_of_ours():
    told = 0
    for row in table():
        for theirs, ours in row.values.items():
            if (setting := row.counterparts[0]) in ("algorithm.loss", "resync.transport", "algorithm.name"):
                told += 1
            if is_setting(setting) and ours != "slimrl":
                assert refused_values([(setting, ours)]) == []
                _, problems = read_recipe(RECIPE, [f"{setting}={theirs}"])
                assert all(problem.message.endswith(f"Did you mean {ours}?") for problem in problems), problems
    assert told > 8


def test_a_reward_of_verl_runs_as_it_is_wrapped():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict = {}
    exec(block, scope)
    prompt = SimpleNamespace(metadata={"data_source": "openai/gsm8k"}, label="205")
    said = {"205": 1.0, "It is 205 ": 1.0, "250": 0.0, None: 0.0}
    for content, expected in said.items():
        trajectory = SimpleNamespace(messages=[{"role": "assistant", "content": content}])
        assert scope["reward"](trajectory, prompt) == expected
    assert scope["reward"](SimpleNamespace(messages=[{"role": "tool", "content": "205"}]), prompt) == 0.0
