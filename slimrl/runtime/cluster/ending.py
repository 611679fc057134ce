"""An early end of a run: signals become one exception, and no process is left behind."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from slimrl.base.errors import Interrupted
from slimrl.base.processes import await_end, send_all
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.state import CheckpointFolder

END_TIMEOUT_S = 10.0
"""How long processes may take to end before they are killed."""

log = logging.getLogger(__name__)


@contextmanager
def ending_on_signals(hint: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """The first SIGINT or SIGTERM raises Interrupted; later ones are ignored, since the cleanup has its own deadlines.

    Yields a function that sets the handlers again after other code, such as Ray, has replaced them.

    Args:
        hint: called when everything has ended; returns advice for the error message.
    """
    ending = False
    cause = ""

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending, cause
        if not ending:
            ending, cause = True, f"ended by {signal.Signals(number).name}"
            raise Interrupted(cause)

    def take_over() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    take_over()
    try:
        yield take_over
    except KeyboardInterrupt:
        # Ray's calls replace an exception that a handler raised inside them by a KeyboardInterrupt of their own.
        raise Interrupted(f"{cause}. {hint()}".strip()) from None
    finally:
        ending = True
        for number, handler in before.items():
            signal.signal(number, handler)


def what_is_left(folder: RunFolder) -> str:
    """How to continue an interrupted run; empty for a folder that has only logs."""
    if not folder.config.is_file():
        return ""
    complete = CheckpointFolder(folder.checkpoints).complete()
    if not complete:
        return f"{folder.path} holds no checkpoint yet: the same command with --resume-or-start starts anew."
    return f"{complete[-1]} is whole: the same command with --resume continues from there."


class ChildProcesses:
    """The descendants of this process that were started after this object was made.

    Call `note` before they are told to end, while their parents still live.
    """

    def __init__(self) -> None:
        self._others = set(psutil.Process().children(recursive=True))
        self._members: set[psutil.Process] = set()

    def note(self) -> None:
        self._members |= set(psutil.Process().children(recursive=True)) - self._others

    def end(self) -> None:
        """Wait for processes that were told to end, and kill those that do not."""
        self.note()
        alive = await_end(self._members, END_TIMEOUT_S)
        for process in alive:
            log.warning("killing %d, which did not end: %s", process.pid, _command(process))
        send_all(alive, signal.SIGKILL)
        await_end(alive, END_TIMEOUT_S)


def _command(process: psutil.Process) -> str:
    try:
        # Later arguments are an engine's settings, which may be secret.
        return " ".join(process.cmdline()[:3])[:200]
    except psutil.Error as error:
        return type(error).__name__
