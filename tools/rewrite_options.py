"""Options that the commands share which write one checkpoint from others, and how these run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from slimrl_tools.rewrite import Rewrite

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not read the result back and compare it.")]
ShardGb = Annotated[float, typer.Option(min=0.000001, help="Gigabytes (1e9 bytes) per file at most.")]


def run(rewrite: "Rewrite", out: Path, *, dry_run: bool, resume: bool, no_check: bool) -> None:
    """Say what is to be written, and write it."""
    from slimrl_tools.rewrite import describe, write_checkpoint

    typer.echo(describe(rewrite, out))
    if dry_run:
        return
    write_checkpoint(rewrite, out, resume=resume, check=not no_check)
