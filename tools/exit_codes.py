"""Exit codes of every `slimrl-tools` command: 0 done, 2 input refused, 1 failed."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slimrl.base.visible import visible


class CheckFailed(Exception):
    """A command wrote a wrong result; the input is not at fault."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn a command's exception into a message on stderr and an exit code."""
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
    typer.echo(visible("\n".join([message, *getattr(error, "__notes__", ())])), err=True)
