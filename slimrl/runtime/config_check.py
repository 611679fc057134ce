"""`slimrl config check`: whether recipes would start, as far as a machine without their models and data can tell."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slimrl.config.load import Command, intended_command
from slimrl.config.problems import RecipeError
from slimrl.config.yaml_source import display_path
from slimrl.models.planned_recipe import read_planned


def check_recipes(
    paths: Sequence[Path], overrides: Sequence[str], *, command: Command | None, files: bool, console: Console
) -> bool:
    """Say of each recipe what is wrong with it, and what is to be noted.

    Args:
        overrides: laid over each of the recipes.
        command: that would be started; None for what each recipe is made for.
        files: refuse recipes whose files are not on this machine.

    Returns:
        Whether none of them is refused.
    """
    refused = 0
    for path in paths:
        meant = command or intended_command(path, overrides)
        try:
            planned = read_planned(path, overrides, meant, files=files, model_needed=False)
        except RecipeError as error:
            console.print(str(error))
            refused += 1
            continue
        for note in planned.notes:
            console.print(str(note))
        console.print(f"{display_path(path)}: ok for slimrl {meant} (model: {planned.model})")
    if len(paths) > 1:
        console.print(f"{len(paths)} recipes, {refused} refused.")
    return not refused
