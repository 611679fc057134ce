"""How commands end: 0 done, 2 the user's input was refused, 1 it failed, 75 it made room (SIGUSR1)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slimrl.observability.terminal import plain_console

PREEMPTED_EXIT_CODE = 75
"""Of a run that ended at SIGUSR1 and is to be queued again; EX_TEMPFAIL of sysexits.h."""


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns what a command raises into one message and an exit code; everything known goes to the log."""
    from slimrl.launch.reports import LaunchError
    from slimrl.runtime.errors import Interrupted, Preempted, RunError

    errors = plain_console(stderr=True)
    try:
        yield
    except ValueError as error:
        logging.getLogger(__name__).exception("refused")
        errors.print(str(error))
        raise typer.Exit(2) from None
    except (RunError, LaunchError) as error:
        logging.getLogger(__name__).error("failed: %s", getattr(error, "details", "") or error)
        errors.print(f"failed: {error}")
        raise typer.Exit(1) from None
    except Preempted as error:
        errors.print(str(error))
        raise typer.Exit(PREEMPTED_EXIT_CODE) from None
    except KeyboardInterrupt as error:
        message = str(error) if isinstance(error, Interrupted) else "ended by SIGINT"
        logging.getLogger(__name__).info(message)
        errors.print(message)
        raise typer.Exit(1) from None
