"""What a recipe's own settings are refused for, as `slimrl config check` lists it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.config.check import check_recipe
from slimrl.config.load import Command, read_recipe
from slimrl.config.problems import Problem


def recipe_problems(
    path: Path | str,
    overrides: Sequence[str] = (),
    model: dict[str, Any] | None = None,
    command: Command = "train",
    **others: Any,
) -> list[Problem]:
    """Problems of values and of rules; `model` is a config.json, and `others` are for check_recipe."""
    loaded, problems = read_recipe(path, overrides, command)
    return problems if loaded is None else problems + check_recipe(loaded.recipe, model, command, **others)
