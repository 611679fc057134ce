"""The table of ready-made rewards in docs/rewards.md has every argument, with its default, as the source has it."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimrl.config.import_path import resolve
from slimrl.config.signatures import SUPPLIED
from slimrl.rewards.http import EndpointSettings
from slimrl.rewards.judge import JudgeSettings, _Judging

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
ROWS = re.findall(r"^\| `(slimrl\.rewards\.[\w.]+:\w+)` \|.*?\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
CALLED_WITH = ("trajectory", "trajectories", "prompt")


def arguments(path: str) -> dict[str, inspect.Parameter]:
    """Those that a recipe may give, but for those of servers."""
    own = inspect.signature(resolve(path, classes=True)).parameters
    found = {name: each for name, each in own.items() if each.kind is not each.VAR_KEYWORD}
    if path.startswith("slimrl.rewards.judge:"):
        shared = inspect.signature(_Judging).parameters
        found |= {
            name: shared[name] for name in JudgeSettings.__annotations__.keys() - EndpointSettings.__annotations__
        }
    supplied = {name for name, each in found.items() if getattr(each.annotation, "__name__", "") in SUPPLIED}
    return {name: each for name, each in found.items() if name not in supplied and name not in CALLED_WITH}


def default_of(text: str) -> Any:
    """What stands in the brackets, before `: ` or `; ` and words on it."""
    return yaml.safe_load(re.split("[:;] ", text)[0])


def test_the_table_has_rewards_with_and_without_arguments():
    assert len(ROWS) >= 20
    assert [path for path, cell in ROWS if not cell.strip()] == [
        f"slimrl.rewards.math:{name}" for name in ("boxed_exact", "boxed_equivalent")
    ]


@pytest.mark.parametrize(("path", "cell"), ROWS, ids=[path for path, _ in ROWS])
def test_each_reward_has_its_arguments_and_their_defaults(path, cell):
    without_words = re.sub(r": at 0 and at `max_tokens` tokens", "", cell)
    told = {name: text for name, _, text in re.findall(r"`(\w+)`( \(([^)]*)\))?", without_words)}
    taken = arguments(path)
    assert told.keys() == taken.keys()
    for name, each in taken.items():
        assert bool(told[name]) == (each.default is not each.empty), name
        if isinstance(each.default, str | int | float | tuple) and each.default not in ("", each.empty):
            given = default_of(told[name])
            assert given == (list(each.default) if isinstance(each.default, tuple) else each.default), name


def test_the_settings_of_servers_are_told_once():
    (told,) = re.findall(r"\*\*Servers\.\*\*.*?are further `args`", PAGE.read_text())
    assert {*re.findall(r"`(\w+)`", told)} - {"args"} == EndpointSettings.__annotations__.keys()
