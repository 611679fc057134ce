"""Exit codes of commands: 0 done, 2 the user's input was refused, 1 failed, 75 preempted by SIGUSR1."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slimrl.base.atomic import FULL, disk_reason
from slimrl.observability.logs import log_folder
from slimrl.observability.terminal import plain_console


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an exception of a command into one message and an exit code; the details go to the log."""
    from slimrl.base.errors import Interrupted, Preempted, RunError
    from slimrl.launch.reports import LaunchError
    from slimrl.launch.slurm import PREEMPTED

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
        if (folder := log_folder()) is not None:
            # The settings take a tenth of a second to import, which --help need not wait for.
            from slimrl.config.yaml_source import display_path

            errors.print(f"logs: {display_path(folder)}")
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        logging.getLogger(__name__).exception("failed")
        where = f"{error.filename}: " if error.filename else ""
        errors.print(
            f"failed: {where}{disk_reason(error)}. Free some and give the same command again; with --resume a run "
            "goes on from its newest checkpoint."
        )
        raise typer.Exit(1) from None
    except Preempted as error:
        errors.print(str(error))
        raise typer.Exit(PREEMPTED) from None
    except KeyboardInterrupt as error:
        message = str(error) if isinstance(error, Interrupted) else "ended by SIGINT"
        logging.getLogger(__name__).info(message)
        errors.print(message)
        raise typer.Exit(1) from None
