"""Settings and commands that a page of docs/ names in code, and what is wrong with them."""

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from slimrl_tools.cli import app as tools

from slimrl.cli import app
from slimrl.cli.evaluation import DEFAULT_COMMAND, GroupWithDefault
from slimrl.config.keys import KEY_TYPES, NAME, PASSTHROUGH, is_known
from slimrl.config.load import read_recipe
from slimrl.config.passthrough import VERDICTS
from slimrl.config.schema.recipe import Recipe
from slimrl.config.verdicts import Verdict

RECIPES = Path(__file__).parents[1] / "recipes"
SECTIONS = frozenset(key.partition(".")[0] for key in KEY_TYPES if "." in key)
"""With what the name of a setting begins, before its first dot."""
_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SETTING = re.compile(r"([a-z_]+(?:\.\w+)+)(?:(?:: |=).*)?")
_FILE = re.compile(r".*\.(?:py|md|yaml|jsonl?|png)")


def code_of(text: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return _CODE.findall(_BLOCK.sub("", text))


def settings_of(text: str) -> Iterator[tuple[str, str]]:
    """(key, value) of what stands in backticks as `a.b`, `a.b: value` or `a.b=value`; the value may be empty."""
    for code in code_of(text):
        found = _SETTING.fullmatch(code)
        if found is not None and found[1].partition(".")[0] in SECTIONS and not _FILE.fullmatch(found[1]):
            yield found[1], code.removeprefix(found[1]).lstrip(":= ")


def is_setting(key: str) -> bool:
    """Whether a recipe may give the key; a field of another package only if its verdict is safe."""
    section, _, name = key.rpartition(".")
    if section in PASSTHROUGH:
        return name in VERDICTS[section] and VERDICTS[section][name].verdict is Verdict.safe
    return is_known(key)


def refused_values(settings: Iterable[tuple[str, str]]) -> list[str]:
    """What a recipe is told of these settings with their values; those without a value are not tried."""
    # Refused for what else it lacks, but not for this.
    given = sorted(f"{key}={value}" for key, value in settings if value and NAME not in key.split("."))
    return [
        str(problem)
        for one in given
        for problem in read_recipe(str(RECIPES / "qwen3_moe" / "qwen3_30b_a3b_gspo.yaml"), [one])[1]
    ]


def is_default(key: str, text: str) -> bool:
    """Whether the text is the default of a setting, as docs/configuration.md writes it."""
    default: Any = Recipe()
    for part in key.split("."):
        default = getattr(default, part, None)
    written = str(default).lower() if isinstance(default, bool) else str(getattr(default, "value", default))
    return default is not None and text == written


def commands_of(text: str) -> list[str]:
    """Command lines of slimrl and slimrl-tools in backticks and in blocks, without comments."""
    lines = [line.partition(" #")[0].strip() for block in _BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in [*code_of(text), *lines] if re.match(r"slimrl(-tools)? [a-z]", line)]


def command_problem(line: str) -> str | None:
    """What does not exist of a command line: its command, or an option."""
    program, *words = shlex.split(line)
    command: Any = typer.main.get_command(app if program == "slimrl" else tools)
    while hasattr(command, "commands"):
        if words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        elif isinstance(command, GroupWithDefault):
            command = command.commands[DEFAULT_COMMAND]
        else:
            return f"{line}: no such command"
    known = {option for parameter in command.params for option in parameter.opts}
    wrong = [word for word in words if word.startswith("--") and word not in known]
    return f"{line}: no option {', '.join(wrong)}" if wrong else None
