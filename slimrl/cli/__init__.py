"""The `slimrl` command; cli/exit_codes.py has its exit codes."""

import gc
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from slimrl.base.threads import end_process_if_calls_hang
from slimrl.cli import config, evaluation, inspect_chat, launch, plan, resync, runs, simulate, watch
from slimrl.cli.exit_codes import exit_codes
from slimrl.cli.unknown_option import CommandWithHints


class _App(typer.Typer):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except SystemExit as end:
            # A tool or a reward that hangs must not change how the command ends.
            if isinstance(end.code, int):
                end_process_if_calls_hang(end.code)
            # The last collections would look at all that is left, for up to a second.
            gc.freeze()
            raise


app = _App(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Look at recipes.")
app.add_typer(config_app, name="config")
eval_app = typer.Typer(
    cls=evaluation.GroupWithDefault, help="Measure a checkpoint, compare two evaluations, or rate versions by games."
)
app.add_typer(eval_app, name="eval")
resync_app = typer.Typer(
    no_args_is_help=True, help="Estimate or measure the transfer of weights from trainer to engines."
)
app.add_typer(resync_app, name="resync")
launch_app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.")
app.add_typer(launch_app, name="launch")

COMMANDS: tuple[tuple[typer.Typer, str, Callable[..., None]], ...] = (
    (app, "train", runs.train),
    (app, "sft", runs.sft),
    (eval_app, evaluation.DEFAULT_COMMAND, evaluation.evaluate),
    (eval_app, "compare", evaluation.compare),
    (eval_app, "tournament", evaluation.tournament),
    (eval_app, "plot", evaluation.plot),
    (app, "rollout", runs.rollout),
    (app, "export", runs.export),
    (app, "report", runs.report),
    (app, "watch", watch.watch),
    (app, "plan", plan.plan),
    (app, "simulate", simulate.simulate),
    (app, "inspect-chat", inspect_chat.inspect_chat),
    (config_app, "show", config.show_settings),
    (config_app, "check", config.check),
    (config_app, "schema", config.schema),
    (resync_app, "estimate", resync.estimate),
    (resync_app, "bench", resync.bench),
    (launch_app, "slurm", launch.slurm),
)
for group, name, command in COMMANDS:
    group.command(name, cls=CommandWithHints)(exit_codes()(command))


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slimrl {version('slimrl')}")
        raise typer.Exit


@app.callback()
def _set_up(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for Mixture-of-Experts language models.

    Exit codes: 0 done, 2 input refused, 1 failed, 75 preempted by SIGUSR1: queue it again to continue.
    """
    # The import paths of a recipe may name modules in the working directory.
    sys.path.insert(0, os.getcwd())
    # Nothing is logged before a run has its log file. Without a handler Python would print errors to stderr.
    logging.getLogger().addHandler(logging.NullHandler())


@launch_app.callback()
def _launch() -> None:
    """Start a run on a cluster."""
