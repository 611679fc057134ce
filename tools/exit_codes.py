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
        _say(str(error), error)
        raise typer.Exit(2) from None
    except (OSError, CheckFailed) as error:
        _say(f"failed: {error}", error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt as error:
        _say("interrupted", error)
        raise typer.Exit(1) from None


def _say(message: str, error: BaseException) -> None:
    typer.echo("\n".join([message, *getattr(error, "__notes__", ())]), err=True)
