"""The `slimrl` command. Exit codes: 0 done, 2 the user's input was refused, 1 it failed, 75 it made room (SIGUSR1)."""

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from slimrl.cli import config, launch, plan, resync, runs
from slimrl.cli.exit_codes import PREEMPTED_EXIT_CODE
from slimrl.data.threads import end_process_if_calls_hang

__all__ = ["PREEMPTED_EXIT_CODE", "app"]


class _App(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as end:
            # A tool or a reward that hangs must not change how the command ends.
            if isinstance(end.code, int):
                end_process_if_calls_hang(end.code)
            raise


app = _App(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(config_app, name="config")
resync_app = typer.Typer(no_args_is_help=True, help="How the weights get from the trainer into the engines.")
app.add_typer(resync_app, name="resync")
launch_app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.")
app.add_typer(launch_app, name="launch")

COMMANDS: dict[str, Callable[..., None]] = {
    "train": runs.train,
    "sft": runs.sft,
    "eval": runs.evaluate,
    "rollout": runs.rollout,
    "export": runs.export,
    "report": runs.report,
    "plan": plan.plan,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
config_app.command("show")(config.show_settings)
config_app.command("check")(config.check)
config_app.command("schema")(config.schema)
resync_app.command("estimate")(resync.estimate)
resync_app.command("bench")(resync.bench)
launch_app.command("slurm")(launch.slurm)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slimrl {version('slimrl')}")
        raise typer.Exit


@app.callback()
def _import_from_here(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for Mixture-of-Experts language models.

    Exit codes: 0 done, 2 input refused, 1 failed, 75 stopped at SIGUSR1, to be queued again.
    """
    # Import paths of a recipe may name modules that lie beside it.
    sys.path.insert(0, os.getcwd())
    # Until a run has a log file nothing is logged; without a handler errors would go to stderr, tracebacks and all.
    logging.getLogger().addHandler(logging.NullHandler())


@launch_app.callback()
def _launch() -> None:
    """Start a run on a cluster."""
