"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

COMMANDS_WITH_RECIPES = ("train", "sft", "eval", "rollout")


def _check_address(address: str | None) -> str | None:
    """`auto` is refused too: it may find somebody else's cluster."""
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            raise typer.BadParameter(f"{address}: give HOST:PORT of the head node.")
    return address


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings laid over the recipe.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")]
ResumeOrStart = Annotated[
    bool,
    typer.Option("--resume-or-start", help="Continue the run if it has a checkpoint, else start it; for queued jobs."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Remove an existing run of this name first.")]
Job = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Queued job that this is an attempt of: a run that it began is continued, "
        "--resume and --overwrite are about runs of others.",
    ),
]
CheckpointLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Gets a line with the step that the run goes on from, `none` for a new one, then one for each checkpoint.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="SLIMRL_RAY_ADDRESS",
        callback=_check_address,
        help="Head node of the Ray cluster to run on; without it the run starts one of its own on this machine.",
    ),
]
