"""`slimrl config check`: checks recipes, even on a machine without their models and data."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from slimrl.config.load import Command, LoadedRecipe, intended_command
from slimrl.config.problems import RecipeError
from slimrl.config.yaml_source import display_path
from slimrl.models.offline_recipe import read_offline


def check_recipes(
    paths: Sequence[Path],
    overrides: Sequence[str],
    *,
    command: Command | None,
    files: bool,
    console: Console,
    data: bool,
) -> bool:
    """Print the errors and warnings of each recipe; returns whether all are valid.

    Recipes that extend one file share its warnings, which are printed once.

    Args:
        command: the command to check for; None for each recipe's own (train or sft).
        files: refuse recipes whose files are not on this machine.
        data: read their data files too, see `data_lines`, and say how much is in each.
    """
    refused, printed = 0, set[str]()
    for path in paths:
        meant = command or intended_command(path, overrides)
        try:
            planned = read_offline(path, overrides, meant, files=files, model_needed=False)
            lines = _data_lines(planned.loaded) if data else []
        except RecipeError as error:
            console.print(str(error))
            refused += 1
            continue
        for note in map(str, planned.notes):
            if note not in printed:
                console.print(note)
        printed |= set(map(str, planned.notes))
        for line in lines:
            console.print(line)
        console.print(f"{display_path(path)}: ok for slimrl {meant} (model: {planned.model})")
    if len(paths) > 1:
        console.print(f"{len(paths)} recipes, {refused} refused.")
    return not refused


def _data_lines(loaded: LoadedRecipe) -> list[str]:
    # Not at the top: it imports torch.
    from slimrl.runtime.checks.data_check import data_lines

    return data_lines(loaded)
