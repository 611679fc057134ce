"""`slimrl watch`."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which any machine may see.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit, as without a terminal.")] = False,
) -> None:
    """Show a run while it goes on: its reward, what it does now, its speed and its newest answers."""
    from slimrl.observability.watch import screen

    screen.watch(run, once=once)
