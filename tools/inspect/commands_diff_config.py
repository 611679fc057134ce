"""`slimrl-tools diff-config`: whether a recipe builds the model that a config.json describes."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from slimrl_tools.command_options import Json
from slimrl_tools.exit_codes import exit_codes
from slimrl_tools.terminal import make_console, make_table

from slimrl.observability.logs import quiet_megatron

if TYPE_CHECKING:
    from slimrl_tools.inspect.config_diff import ConfigDiff


def diff_config(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with a config.json.")],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a config.json with the model that the trainer builds under a recipe. Exit code 1 if they differ.

    One line per field of megatron-core: the config.json keys that decide it, the family's value, and the value that the
    trainer builds. They differ if the trainer builds another value, or if config.json has a key that nothing reads and
    that may matter. What the recipe's trainer.megatron changes of training, speed or rounding is shown and passes; a
    field that changes the model is refused, as at a start.

    \b
    Examples:
      slimrl-tools diff-config Qwen3-30B-A3B recipes/tiny_moe/gspo_calculator.yaml
      slimrl-tools diff-config model recipes/tiny_moe/sft.yaml trainer.megatron.moe_z_loss_coeff=0.001
    """
    with exit_codes():
        from slimrl.config.hf_config import read_hf_config
        from slimrl.config.load import load_recipe

        loaded = load_recipe(recipe, [*(overrides or []), f"model.path={hf_dir}"], "export")
        hf_config = read_hf_config(hf_dir)
        quiet_megatron()
        from slimrl_tools.inspect.config_diff import diff_config as compare

        result = compare(hf_config, loaded.recipe.trainer)
        if as_json:
            typer.echo(json.dumps(asdict(result) | {"agrees": result.agrees}, indent=2))
        else:
            _show(result)
    if not result.agrees:
        raise typer.Exit(1)


def _show(result: "ConfigDiff") -> None:
    console = make_console()
    table = make_table("megatron-core", "config.json", "family", "built", "")
    for row in result.rows:
        if row.family is None and row.built is None:
            continue
        keys = ", ".join(f"{key} {_short(value)}" for key, value in row.keys.items())
        table.add_row(
            row.field, keys, _short(row.family), _short(row.built), row.note, style=None if row.agrees else "red"
        )
    console.print(table)
    if result.fixed:
        console.print(f"\nonly this value is supported: {_listed(result.fixed)}")
    if result.irrelevant:
        console.print(f"not read, and harmless: {', '.join(result.irrelevant)}")
    if result.unread:
        console.print(f"NOT READ, but may matter: {_listed(result.unread)}")
    wrong = [row.field for row in result.rows if not row.agrees]
    if wrong:
        console.print(f"BUILT OTHERWISE: {', '.join(wrong)}")
    console.print(f"{result.family}: {'the trainer builds this model' if result.agrees else 'ANOTHER MODEL is built'}")


def _short(value: Any) -> str:
    """Repeated entries of a list as one and their number."""
    if isinstance(value, list) and len(value) > 2:
        runs = [(item, len(list(group))) for item, group in groupby(value)]
        return "[" + ", ".join(f"{item} x {count}" if count > 1 else str(item) for item, count in runs) + "]"
    return "" if value is None else str(value)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in values.items())
