"""How a run makes room: SIGUSR1 asks it to save what it has and to end, so that it can be queued again.

1. The step under way is finished, its resync and evaluation included, and a checkpoint is written.
2. A rollout that is still under way `checkpoint.grace_s` later is dropped. The weights are still those of the step
   before, so the checkpoint is of that step, and a resumed run makes the rollout again.
3. When its processes have ended, the run's folder gets the file `requeue`, and the command exits with code 75.
A signal that comes while the last step is under way changes nothing.
"""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.errors import Preempted, StepDropped

SIGNAL = signal.SIGUSR1

log = logging.getLogger(__name__)


class Preemption:
    """Whether the run was asked to make room, and since when."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deadline: float | None = None

    @property
    def asked(self) -> bool:
        return self._deadline is not None

    def ask(self) -> None:
        """The first time counts."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s

    def check(self) -> None:
        """To be called again and again where the step can be dropped; raises StepDropped when the grace is over."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StepDropped


@contextmanager
def preemption_by_signal(grace_s: float) -> Iterator[Preemption]:
    """What SIGUSR1 asks of this process is noted; waits go on.

    Args:
        grace_s: how long a step that can be dropped may still go on.
    """
    preemption = Preemption(grace_s)

    def note(number: int, frame: FrameType | None) -> None:
        preemption.ask()

    before = signal.signal(SIGNAL, note)
    try:
        yield preemption
    finally:
        signal.signal(SIGNAL, before)


def raise_preempted(folder: RunFolder, step: int, total_steps: int) -> None:
    """Mark the folder of a run that ended before its last step, if that is so.

    Raises:
        Preempted: it is so.
    """
    if step >= total_steps:
        return
    folder.requeue.write_text(f"{step}\n")
    log.info("preempted after step %d", step)
    how = "--resume continues from there" if folder.has_checkpoint else "--resume-or-start starts anew"
    raise Preempted(f"preempted by {SIGNAL.name} after step {step} of {total_steps}: the same command with {how}.")
