"""`slimrl-tools environment`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from slimrl_tools.command_options import Seed
from slimrl_tools.exit_codes import exit_codes

app = typer.Typer(no_args_is_help=True, help="Environments that others made (docs/environments.md).")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of an environment that `list` shows.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="Of the environment's tasks, such as a difficulty; repeatable."),
]


@app.command("list")
def list_environments() -> None:
    """Show what there is, and whether it works here."""
    from slimrl_tools.terminal import make_console, make_table

    from slimrl.environments.catalogue import ENVIRONMENTS
    from slimrl.environments.venvs import why_not_here

    table = make_table("name", "what it is", "made of", "MB", "here", right=("MB",))
    for entry in ENVIRONMENTS.values():
        here = why_not_here(entry) or "works"
        table.add_row(entry.name, entry.summary, entry.packages, str(entry.size_mb), here)
    make_console().print(table)


@app.command()
def install(names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Environments, or `all`.")]) -> None:
    """Make the virtual environment of each, from the versions that slimrl pins."""
    from slimrl_tools.progress import folder_progress

    from slimrl.environments.catalogue import ENVIRONMENTS, entry_of
    from slimrl.environments.venvs import install as make_venv
    from slimrl.environments.venvs import venv_python, venvs_folder, why_not_here

    with exit_codes():
        for entry in ENVIRONMENTS.values() if names == ["all"] else [entry_of(name) for name in names]:
            if why_not_here(entry):
                typer.echo(f"{entry.name}: installing {entry.packages}, {entry.size_mb} MB")
                with folder_progress(f"installing {entry.name}", venvs_folder() / entry.name, entry.size_mb * 10**6):
                    make_venv(entry)
            typer.echo(f"{entry.name}: {why_not_here(entry) or venv_python(entry.name)}")


@app.command()
def data(
    name: Name,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the files, which is made.")],
    num: Annotated[int, typer.Option(min=1, help="Tasks to train on.")] = 100,
    heldout: Annotated[int, typer.Option(min=1, help="Tasks to evaluate on.")] = 50,
    seed: Seed = 0,
    options: Options = None,
) -> None:
    """Write the prompt files train.jsonl and heldout.jsonl of an environment, and what they need."""
    from slimrl_tools.environment.check import write_data

    from slimrl.environments.catalogue import entry_of

    with exit_codes():
        write_data(entry_of(name), out, num=num, heldout=heldout, seed=seed, options=_values(options))
        typer.echo("\n".join(str(path) for path in sorted(out.glob("*.jsonl"))))


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of an environment that `list` shows, or MODULE:CLASS.")],
    player: Annotated[
        str,
        typer.Option(
            help="Who plays: solver, the default, or random; of MODULE:CLASS another MODULE:CLASS, or one turn that "
            "says nothing."
        ),
    ] = "",
    seed: Seed = 0,
    options: Options = None,
    prompts: Annotated[Path | None, typer.Option(help="Of MODULE:CLASS: file whose first prompt is played.")] = None,
    venv: Annotated[str, typer.Option(help="Of MODULE:CLASS: its agent.environment_venv.")] = "",
    args: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Of MODULE:CLASS: an argument; repeatable.")
    ] = None,
) -> None:
    """Play an episode by a scripted player and show it."""
    with exit_codes():
        if ":" not in name:
            from slimrl_tools.environment.check import check as play_and_show

            from slimrl.environments.catalogue import entry_of

            if prompts or venv or args:
                raise ValueError("--prompts, --venv and --args are for MODULE:CLASS, a class of your own")
            play_and_show(entry_of(name), player=player or "solver", seed=seed, options=_values(options))
            return
        from slimrl_tools.environment.check_own import check_own

        if prompts is None or options:
            raise ValueError(f"{name}: a class of your own needs --prompts FILE, and takes no --set")
        # The class and the player may be in the working directory.
        sys.path.insert(0, os.getcwd())
        check_own(name, prompts=prompts, player=player, venv=venv, arguments=_arguments(args), seed=seed)


@app.command()
def results(
    name: Name,
    trajectories: Annotated[
        Path, typer.Argument(metavar="FILE", help="Of `slimrl rollout --out`, or items.jsonl of `slimrl eval --out`.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the results.")],
    model: Annotated[str, typer.Option(help="Name of the model in the results.")],
) -> None:
    """Write trajectories in the published format of an environment's benchmark, for its own scorer: bfcl has one."""
    from importlib import import_module
    from importlib.util import find_spec

    from slimrl.environments.catalogue import entry_of

    with exit_codes():
        module = f"{entry_of(name).module}.results"
        if find_spec(module) is None:
            raise ValueError(f"{name}: its benchmark has no format for results")
        import_module(module).write_results(trajectories, out, model)
        typer.echo(str(out))


def _arguments(given: list[str] | None) -> dict[str, Any]:
    """Values as a recipe has them. Raises ValueError: one is not KEY=VALUE, or no YAML."""
    from slimrl.config.problems import Problem
    from slimrl.config.yaml_source import read_overrides

    problems: list[Problem] = []
    arguments = {entry.key: entry.value for entry in read_overrides(given or [], problems)}
    if problems:
        raise ValueError("\n".join(f"--args {problem.key}: {problem.message}" for problem in problems))
    return arguments


def _values(options: list[str] | None) -> dict[str, Any]:
    """Raises ValueError: one is not OPTION=VALUE."""
    values: dict[str, Any] = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--set {option}: write OPTION=VALUE")
        values[name] = int(value) if value.lstrip("-").isdecimal() else value
    return values
