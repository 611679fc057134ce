"""`slimrl config show`, `check` and `schema`."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from slimrl.cli.arguments import ForCommand, Overrides, Recipe
from slimrl.observability.terminal import plain_console

OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w.-]*=|~")
"""Start of a setting on the command line, which tells it from a recipe."""


def show_settings(recipe: Recipe, overrides: Overrides = None, command: ForCommand = None) -> None:
    """Print every setting with its value and its origin."""
    from slimrl.config.load import intended_command, load_recipe
    from slimrl.config.show import show

    command_meant = command or intended_command(recipe, overrides or [])
    rows = show(load_recipe(recipe, overrides or [], command_meant))
    console = plain_console()
    if not console.is_terminal:
        # In a file or a pipe each setting is one whole line.
        for row in rows:
            console.print("  ".join(row))
        return
    table = Table(box=None, header_style="bold")
    for title in ("key", "value", "from"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    plain_console(soft_wrap=False).print(table)


def check(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE... [KEY=VALUE]...", help="Recipes, YAML files, and settings laid over each of them."
        ),
    ],
    command: ForCommand = None,
    files: Annotated[
        bool, typer.Option("--files", help="Refuse models and data that are not on this machine.")
    ] = False,
    data: Annotated[
        bool,
        typer.Option(
            "--data",
            help="Read the data files too, as a start does, and print how many prompts or examples they have; "
            "needs the tokenizer of model.path, and imports the modules that the recipe names.",
        ),
    ] = False,
) -> None:
    """List every problem of recipes, without a GPU or their models. Exit codes: 0 accepted, 1 refused."""
    from slimrl.config.keys import is_known
    from slimrl.runtime.checks.config_check import check_recipes

    overrides = [argument for argument in recipes if OVERRIDE.match(argument)]
    paths = [Path(argument) for argument in recipes if not OVERRIDE.match(argument)]
    if not paths:
        raise ValueError("no recipe given.")
    for path in paths:
        if is_known(str(path)) and not path.exists():
            raise ValueError(f"{path} is a setting, which needs a value: {path}=VALUE.")
    console = plain_console()
    if not check_recipes(paths, overrides, command=command, files=files, data=data, console=console):
        raise typer.Exit(1)


def schema() -> None:
    """Print the reference of all settings: type, default and meaning."""
    from slimrl.config.reference import reference_page

    typer.echo(reference_page(), nl=False)
