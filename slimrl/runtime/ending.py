"""How a run ends before its time: signals become one exception, and no process is left behind."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.errors import Interrupted
from slimrl.runtime.state import CheckpointFolder

END_TIMEOUT_S = 10.0
"""How long processes that were told to end may take before they are killed."""

log = logging.getLogger(__name__)


@contextmanager
def ending_on_signals(hint: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM raise Interrupted, once: what follows is the way out, which has its own deadlines.

    Yields a function that takes the signals over again from whoever has since replaced their handlers, as Ray does.

    Args:
        hint: called when everything has ended; what the user is told beside the signal's name.
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
        # Ray's calls raise a KeyboardInterrupt of their own in place of what a handler raised inside them.
        raise Interrupted(f"{cause}. {hint()}".strip()) from None
    finally:
        ending = True
        for number, handler in before.items():
            signal.signal(number, handler)


def what_is_left(folder: RunFolder) -> str:
    """How a run that was interrupted can be continued; empty for a folder that holds logs alone."""
    if not folder.config.is_file():
        return ""
    complete = CheckpointFolder(folder.checkpoints).complete()
    if not complete:
        return f"{folder.path} holds no checkpoint yet: the same command with --resume-or-start starts anew."
    return f"{complete[-1]} is whole: the same command with --resume continues from there."


class Family:
    """The processes below this one that were started since it was made.

    `note` is called before they are told to end, while it is still known who started whom.
    """

    def __init__(self) -> None:
        self._others = set(psutil.Process().children(recursive=True))
        self._members: set[psutil.Process] = set()

    def note(self) -> None:
        self._members |= set(psutil.Process().children(recursive=True)) - self._others

    def end(self) -> None:
        """Wait for those that have been told to end, and kill those that do not."""
        self.note()
        _, alive = psutil.wait_procs(self._members, timeout=END_TIMEOUT_S)
        for process in alive:
            log.warning("killing %d, which did not end: %s", process.pid, _command(process))
            _kill(process)
        psutil.wait_procs(alive, timeout=END_TIMEOUT_S)


def _command(process: psutil.Process) -> str:
    try:
        # An engine's further arguments are settings, which may be secret.
        return " ".join(process.cmdline()[:3])[:200]
    except psutil.Error as error:
        return type(error).__name__


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
