"""Evaluations on engines of their own, while the others sample and the trainer trains (`eval.engines`).

1. The engines leave the rollouts with the weights that they have, and skip resyncs.
2. The evaluation runs on the event loop of the rollout service.
3. When it has ended, the next resync gives its engines the current weights, and they serve rollouts again.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from slimrl.data.trajectory import Prompt
from slimrl.evaluation.item import Item
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.rollout_stage import RolloutStage

POLL_S = 1.0
"""Between two checks that the run goes on, while it waits for an evaluation."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A finished evaluation."""

    step: int
    sets: dict[str, list[Item]]
    seconds: float


class EvaluationBeside:
    """At most one evaluation at a time."""

    def __init__(
        self, sets: Mapping[str, Sequence[Prompt]], stage: RolloutStage, engines: EngineGroup, num_engines: int
    ) -> None:
        """
        Args:
            num_engines: those that an evaluation gets.
        """
        self._sets, self._stage, self._engines, self._num_engines = sets, stage, engines, num_engines
        self._running: Future[dict[str, list[Item]]] | None = None
        self._step, self._began, self._ended = 0, 0.0, 0.0

    @property
    def step(self) -> int | None:
        """Of the evaluation that runs."""
        return None if self._running is None else self._step

    def begin(self, step: int, weight_version: int, label: str) -> bool:
        """Begin the evaluation of a step, whose weights the engines have as this version. The one before was taken.

        Returns:
            False if the recipe sets no engines aside, or none can be spared now.
        """
        assert self._running is None, f"the evaluation of step {self._step} was not taken"
        if not self._num_engines or not (num_engines := self._engines.set_aside(self._num_engines)):
            return False
        self._step, self._began = step, time.monotonic()
        self._running = self._stage.begin_evaluation(
            self._sets, label=label, num_engines=num_engines, weight_version=weight_version
        )
        self._running.add_done_callback(self._note_end)
        return True

    def take(self) -> Evaluated | None:
        """The evaluation if it has ended; its engines take part in the next resync.

        Raises:
            RunError: too many of its trajectories failed, or other weights sampled some of them.
        """
        if self._running is not None and self._engines.evaluation_is_lost:
            log.warning("the evaluation of step %d has lost its engines and is given up", self._step)
            self._running.cancel()
            self._running = None
            self._engines.take_back()
        if self._running is None or not self._running.done():
            return None
        ended, self._running = self._running, None
        self._engines.take_back()
        return Evaluated(step=self._step, sets=ended.result(), seconds=self._ended - self._began)

    def wait(self, check: Callable[[], None]) -> Evaluated | None:
        """`take`, when the evaluation that runs has ended; None if there is none.

        Args:
            check: called every second; an exception that it raises ends the wait.
        """
        while self._running is not None and not wait([self._running], timeout=POLL_S).done:
            check()
            if self._engines.evaluation_is_lost:
                break
        return self.take()

    def _note_end(self, _: Future[dict[str, list[Item]]]) -> None:
        self._ended = time.monotonic()
