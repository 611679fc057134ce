"""Preemption: SIGUSR1 asks a run to save a checkpoint and exit, so that its job can be queued again.

1. The run finishes the current step, with resync and evaluation, and saves a checkpoint.
2. If the rollout still runs after `checkpoint.grace_s`, the step is dropped. The weights are then those of the step
   before: the checkpoint is of that step, and a resumed run repeats the rollout.
3. When its processes have ended, the run writes the file `requeue` into its folder and exits with code 75.
During the last step the signal changes nothing.
"""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from slimrl.base.errors import Preempted, StepDropped
from slimrl.observability.run_folder import RunFolder

SIGNAL = signal.SIGUSR1

log = logging.getLogger(__name__)


class Preemption:
    """Whether the run was asked to end early, and the deadline of its rollout, `grace_s` later."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deadline: float | None = None

    @property
    def asked(self) -> bool:
        return self._deadline is not None

    def ask(self) -> None:
        """Ask the run to end early; only the first call counts."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s

    def check(self) -> None:
        """Call it regularly while the step can be dropped; raises StepDropped after the grace period."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise StepDropped("its rollout took longer than checkpoint.grace_s")


@contextmanager
def preemption_by_signal(grace_s: float) -> Iterator[Preemption]:
    """Record SIGUSR1 without interrupting what the process waits for."""
    preemption = Preemption(grace_s)
    before = signal.signal(SIGNAL, lambda number, frame: preemption.ask())
    try:
        yield preemption
    finally:
        signal.signal(SIGNAL, before)


def raise_preempted(folder: RunFolder, step: int, total_steps: int) -> None:
    """Mark the folder of a run that ended before its last step; do nothing after the last step.

    Raises:
        Preempted: the run ended before its last step.
    """
    if step >= total_steps:
        return
    folder.requeue.write_text(f"{step}\n")
    log.info("preempted after step %d", step)
    how = "--resume continues from there" if folder.has_checkpoint else "--resume-or-start starts anew"
    raise Preempted(f"preempted by {SIGNAL.name} after step {step} of {total_steps}: the same command with {how}.")
