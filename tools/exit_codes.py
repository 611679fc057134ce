"""Exit codes of every `slimrl-tools` command: 0 done, 2 the user's input was refused, 1 it failed."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


class CheckFailed(Exception):
    """What a command wrote is not what it should be; nothing of the user's input is at fault."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what a command raises into one message on stderr and an exit code."""
    try:
        yield
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except (OSError, CheckFailed) as error:
        typer.echo(f"failed: {error}", err=True)
        raise typer.Exit(1) from None
