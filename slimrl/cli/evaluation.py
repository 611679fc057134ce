"""`slimrl eval`, `slimrl eval compare`, `slimrl eval plot` and `slimrl eval tournament`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from slimrl.base.imports import imports_uncollected
from slimrl.cli.arguments import Overrides, RayAddress, Recipe

DEFAULT_COMMAND = "run"

JsonFile = Annotated[Path | None, typer.Option("--json-file", help="Write the figures to this file.")]


class _GroupContext(typer.Context):
    """The context of the default command, whose name nobody writes."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None
        return self.parent.command_path


class GroupWithDefault(TyperGroup):
    """Runs `DEFAULT_COMMAND` where no command is named: `slimrl eval RECIPE` as well as `slimrl eval compare A B`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands[DEFAULT_COMMAND].context_class = _GroupContext

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else [DEFAULT_COMMAND, *args])


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    checkpoint: Annotated[Path, typer.Option(help="Hugging Face checkpoint folder, such as RUN/export/hf.")] = ...,  # type: ignore[assignment]
    past: Annotated[
        Path | None, typer.Option(help="Hugging Face checkpoint folder that plays the roles of the player `past`.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for every trajectory and the results; an interrupted evaluation goes on there."),
    ] = None,
    json_file: JsonFile = None,
    ray_address: RayAddress = None,
) -> None:
    """Measure a checkpoint on the recipe's evaluation sets. `slimrl eval compare A B` compares two evaluations."""
    with imports_uncollected():
        from slimrl.runtime import evaluation

    evaluation.evaluate(
        recipe,
        overrides or [],
        checkpoint=checkpoint,
        past=past,
        out=out,
        json_file=json_file,
        ray_address=ray_address,
    )


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of an evaluation, its --out.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of another one of the same prompts.")],
    answers: Annotated[int, typer.Option(min=0, help="Print this many questions of each set with both answers.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare two evaluations prompt by prompt: the difference B - A with its interval."""
    from slimrl.base.output_file import check_output_file
    from slimrl.evaluation.answer_rows import answer_rows
    from slimrl.evaluation.comparison import ALL_SETS, compare
    from slimrl.evaluation.folder import EvalFolder
    from slimrl.evaluation.tables import print_answers, print_comparison

    if json_file is not None:
        check_output_file("--json-file", json_file)
    comparisons = compare(EvalFolder(a), EvalFolder(b))
    print_comparison(comparisons)
    if answers > 0:
        print_answers(answer_rows(EvalFolder(a), EvalFolder(b), answers))
    if json_file is not None:
        sets = {one.name: asdict(one) for one in comparisons}
        figures = {"a": str(a), "b": str(b), "together": sets.pop(ALL_SETS, None), "sets": sets}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


def tournament(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run whose environment has two roles.")],
    overrides: Overrides = None,
    games: Annotated[int, typer.Option(min=2, help="Games of each pair; in half of them the seats are swapped.")] = 64,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Another Hugging Face checkpoint of the model that plays; may repeat."),
    ] = None,
    seats: Annotated[
        str | None,
        typer.Option(metavar="ROLE,ROLE", help="The two roles; those of the run's trajectories if left out."),
    ] = None,
    anchor: Annotated[str | None, typer.Option(help="Who has the rating 0; the first version if left out.")] = None,
    json_file: JsonFile = None,
    ray_address: RayAddress = None,
) -> None:
    """Rate the versions that a run kept, its export and the recipe's players by games on the evaluation sets."""
    with imports_uncollected():
        from slimrl.runtime.tournament import tournament

    tournament(
        run,
        overrides or [],
        games=games,
        others=checkpoint or [],
        seats=seats,
        anchor=anchor,
        json_file=json_file,
        ray_address=ray_address,
    )


def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="EVAL...", help="Folders of evaluations, their --out.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("evaluations.png"),
    title: Annotated[str, typer.Option(help="Title of the figure.")] = "",
) -> None:
    """Draw the mean of each evaluation against the tokens that it sampled."""
    from slimrl.base.output_file import check_output_file
    from slimrl.evaluation.folder import EvalFolder
    from slimrl.evaluation.plot import write_plot

    check_output_file("--out", out)
    write_plot([EvalFolder(one) for one in folders], out, title)
    typer.echo(f"plot: {out}")
