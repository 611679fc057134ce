"""`slimrl config show`, `check` and `schema`."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from slimrl.cli.arguments import COMMANDS_WITH_RECIPES, Overrides, Recipe
from slimrl.cli.exit_codes import exit_codes
from slimrl.observability.terminal import plain_console

PIPED_COLUMNS = 500

OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""How a setting on the command line begins; a recipe has no such name."""


def show_settings(
    recipe: Recipe,
    overrides: Overrides = None,
    command: Annotated[
        str | None, typer.Option(help="train, sft, eval or rollout; without it what the recipe is made for.")
    ] = None,
) -> None:
    """Print every setting with its value and where that came from."""
    with exit_codes():
        from slimrl.config.load import intended_command, load_recipe
        from slimrl.config.show import show

        if command not in (None, *COMMANDS_WITH_RECIPES):
            raise ValueError(f"--command {command}: {', '.join(COMMANDS_WITH_RECIPES)}")
        table = Table(box=None, header_style="bold")
        for title in ("key", "value", "from"):
            table.add_column(title, overflow="fold")
        meant = command or intended_command(recipe, overrides or [])
        for row in show(load_recipe(recipe, overrides or [], meant)):  # type: ignore[arg-type]
            table.add_row(*row)
        # Into a file or a pipe each setting goes whole, on one line.
        plain_console(soft_wrap=False, piped_columns=PIPED_COLUMNS).print(table)


def check(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes, YAML files, and settings laid over each of them."
        ),
    ],
    command: Annotated[
        str | None, typer.Option(help="train, sft, eval or rollout; without it what each recipe is made for.")
    ] = None,
    files: Annotated[bool, typer.Option("--files", help="Refuse what is not on this machine: model, data.")] = False,
) -> None:
    """Say everything that is wrong with recipes, without a GPU or their models. Exit codes: 0 nothing is, 1 refused."""
    with exit_codes():
        from slimrl.runtime.config_check import check_recipes

        if command not in (None, *COMMANDS_WITH_RECIPES):
            raise ValueError(f"--command {command}: {', '.join(COMMANDS_WITH_RECIPES)}")
        overrides = [argument for argument in recipes if OVERRIDE.match(argument)]
        paths = [Path(argument) for argument in recipes if not OVERRIDE.match(argument)]
        if not paths:
            raise ValueError("no recipe given.")
        console = plain_console()
        if not check_recipes(paths, overrides, command=command, files=files, console=console):  # type: ignore[arg-type]
            raise typer.Exit(1)


def schema() -> None:
    """Print the reference of every setting: its type, its default, and what it means."""
    with exit_codes():
        from slimrl.config.reference import reference_page

        typer.echo(reference_page(), nl=False)
