"""Steps of a version that all of the trainer's ranks take together, and learn together how they ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from slimrl.data.engine import EngineError
from slimrl.resync.engine_calls import SendThread
from slimrl.resync.ranks import RankError
from slimrl.resync.report import Clock, SendClock
from slimrl.resync.transfer import Progress, SyncErrors


def together(sync_errors: SyncErrors, place: str, action: Callable[[], None]) -> None:
    """Run an action; all ranks learn how it ended on each.

    Raises:
        RankError: another rank died or is late. Whatever `sync_errors` raises.
    """
    error: Exception | None = None
    with named(place):
        try:
            action()
        except (EngineError, OSError, ValueError) as raised:
            error = raised
        sync_errors(place, error)


@contextmanager
def named(place: str) -> Iterator[None]:
    """Say in a RankError where the ranks were."""
    try:
        yield
    except RankError as error:
        raise RankError(f"{place}: {error}") from error


class Pipelined:
    """Parts of a version, each of which is filled into a slot while the one before is sent and loaded.

    All ranks agree twice on each part k: that it is whole, so it is sent; and that part k - 1 has arrived, so its slot
    is filled with part k + 1.

    Args:
        places: name of each part, for messages.
        timeout_s: longest time of a send.
    """

    def __init__(
        self,
        places: list[str],
        sync_errors: SyncErrors,
        clock: Clock,
        on_progress: Progress | None,
        timeout_s: float,
    ) -> None:
        self._places, self._sync_errors, self._clock = places, sync_errors, clock
        self._on_progress, self._timeout_s = on_progress, timeout_s
        self._send_clock = SendClock(clock)
        self._sending: list[SendThread] = []

    def run(
        self,
        fill: Callable[[int], Exception | None],
        send: Callable[[int], None] | None,
        *,
        overlapping: bool,
    ) -> None:
        """
        Args:
            fill: fills the slot of a part, and returns an error that all ranks must learn.
            send: sends a part, in a thread of its own; None on a rank that sends to no engine, or no longer.
            overlapping: a send may begin before the one before it has ended.

        Raises:
            RankError: another rank died or is late. Whatever `sync_errors` raises.
        """
        try:
            for number, place in enumerate(self._places):
                with named(place):
                    problem = fill(number)
                    with self._clock("agree"):
                        self._sync_errors(place, problem)
                if send is not None:
                    after = None if overlapping else next(iter(self._sending), None)
                    timed = partial(self._send_clock.run, partial(send, number))
                    self._sending.append(SendThread(timed, after))
                if number:
                    self._arrive(number - 1)
            if self._places:
                self._arrive(len(self._places) - 1)
        finally:
            for each in self._sending:
                each.wait(self._timeout_s)

    def _arrive(self, number: int) -> None:
        """Wait until a part, the oldest that is being sent, has arrived everywhere."""
        error = None
        if self._sending:
            with self._clock("wait"):
                error = self._sending.pop(0).wait(self._timeout_s)
                if error is not None:
                    # All engines are probed next, and one that still loads does not answer.
                    for each in self._sending:
                        each.wait(self._timeout_s)
        with named(self._places[number]), self._clock("agree"):
            self._sync_errors(self._places[number], error)
        if self._on_progress is not None:
            self._on_progress(number + 1, len(self._places))
