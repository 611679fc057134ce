"""Trainers that die: their ranks are started anew in place, and the run goes on from its newest checkpoint, or from a
newer copy in memory (memory_folder.py). Likewise where losses or weights that are not finite would end the run, if it
may go back (`stop.rewind_not_finite`); then from before the first of the updates that were skipped in a row, if there
is a checkpoint.

Engines, gateway, sandboxes, environments and episode workers stay as they are. What the run knows is read again from
the checkpoint, as `--resume` does, so that it goes on exactly as a resumed run would.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from slimrl.base.errors import NotFinite, NotLoaded, RunError, StageError, TrainerLost
from slimrl.config.schema.run import RunConfig
from slimrl.observability.progress import Progress
from slimrl.runtime.left_out import LeftOut
from slimrl.runtime.not_finite import listed
from slimrl.runtime.run import Run
from slimrl.runtime.state import RunState

log = logging.getLogger(__name__)


class TrainerRestarts:
    """Restarts the trainer as often as the recipe allows."""

    def __init__(
        self,
        limits: RunConfig,
        newest: Callable[[], tuple[Path | None, RunState]],
        progress: Progress,
        now: Callable[[], float] = time.monotonic,
        *,
        left_out: LeftOut,
        rewinds: bool = False,
    ) -> None:
        """
        Args:
            newest: goes back to the newest checkpoint; returns it and its state, or None and a new state.
            left_out: what the run leaves out; gets more where it goes back for numbers that are not finite.
            rewinds: it may go back for these, which otherwise end it.
            now: a clock, in seconds.
        """
        self._limits, self._newest, self._progress, self._now = limits, newest, progress, now
        self._times: list[float] = []
        self._left_out, self._rewinds = left_out, rewinds

    def go_on(
        self,
        begin: Callable[[Path | None, RunState], tuple[Run, Callable[[], None]]],
        checkpoint: Path | None,
        state: RunState,
    ) -> RunState:
        """Run to the end, with as many restarts as it takes.

        Args:
            begin: makes a run that goes on from a checkpoint, and its loop.

        Returns:
            The state at the end.

        Raises:
            StageError: see `_restart`.
            RunError: see `_go_back`.
        """
        while True:
            self._left_out.end_row(state)
            run, loop = begin(checkpoint, state)
            try:
                loop()
                return state
            except TrainerLost as lost:
                checkpoint, state = self._restart(run, lost)
            except NotFinite as fault:
                run.complete_checkpoint(copies=True)
                checkpoint, state = self._go_back(run, state, fault)
            except Exception:
                run.complete_checkpoint()
                raise

    def _go_back(self, run: Run, state: RunState, fault: NotFinite) -> tuple[Path | None, RunState]:
        """As `_restart`, without what was at fault.

        Raises:
            RunError: the run may not go back, or has done so before, or too little would be left.
        """
        if not self._rewinds:
            raise fault
        if self._left_out.has_gone_back:
            raise RunError(f"{fault}. The run had gone back before, which stop.rewind_not_finite does once") from fault
        items = state.suspects
        try:
            self._left_out.go_back(items)
        except ValueError as error:
            raise RunError(f"{fault}. The run cannot go back and leave out what was at fault: {error}") from fault
        self._progress.say(
            f"warning: {fault}; the run goes back and leaves out "
            + (f"{len(items)} from now on: {listed(items)}" if items else "nothing")
        )
        return self._restart(run)

    def _restart(self, run: Run, lost: TrainerLost | None = None) -> tuple[Path | None, RunState]:
        """Start the ranks of a run anew; where they are lost again meanwhile, once more. A copy in memory that they
        cannot load is forgotten, and they take an older one or the disk's.

        Args:
            lost: why, if the run lost them.

        Returns:
            The checkpoint that they have loaded and its state, from which the run goes on.

        Raises:
            StageError: `run.max_restarts` allows no more, or a rank cannot be started.
        """
        began = self._now()
        while True:
            if lost is not None:
                self._count(lost)
                self._progress.say(f"warning: {lost}; the trainer is started anew")
            run.end_trainers()
            checkpoint, state = self._newest()
            try:
                with self._progress.stage("starting the trainer"):
                    run.restart_trainers(checkpoint)
            except TrainerLost as again:
                lost = again
                continue
            except NotLoaded as error:
                if not run.forget_copy(checkpoint):
                    raise
                log.warning("%s\n%s", error, error.details)
                self._progress.say(f"warning: {error}; the copy of step {state.step} in memory is not used")
                lost = None
                continue
            text = (
                f"the trainer has started again after {self._now() - began:.1f} s, and goes on after step {state.step}"
            )
            log.warning("%s", text)
            self._progress.say(text)
            return checkpoint, state

    def _count(self, lost: TrainerLost) -> None:
        log.warning("the trainer is lost: %s\n%s", lost, lost.details)
        now, limits = self._now(), self._limits
        self._times = [one for one in self._times if now - one < limits.restart_window_s]
        if len(self._times) < limits.max_restarts:
            self._times.append(now)
            return
        if not limits.max_restarts:
            raise lost
        raise StageError(
            f"{lost}; run.max_restarts = {limits.max_restarts} within run.restart_window_s = "
            f"{limits.restart_window_s:g} s allows no more restarts of the trainer",
            lost.details,
        ) from lost
