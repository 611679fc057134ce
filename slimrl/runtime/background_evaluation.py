"""Background evaluations: on engines of their own, while the others sample and the trainer trains (`eval.engines`).

1. The engines leave the rollouts with the weights that they have, and skip resyncs.
2. The evaluation runs on the event loop of the rollout service.
3. When it has ended, the next resync gives its engines the current weights, and they serve rollouts again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from slimrl.base.errors import RunError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.evaluation.item import Item, item_keys, item_of
from slimrl.observability.progress import Progress
from slimrl.rollout.errors import refuse_failures
from slimrl.rollout.stage import RolloutStage, all_of, planned_trajectories
from slimrl.runtime.cluster.engine_group import EngineGroup

POLL_S = 1.0
"""Seconds between two checks that the run goes on, while it waits for an evaluation."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The items of a finished evaluation and their trajectories, by set."""

    step: int
    sets: dict[str, list[Item]]
    trajectories: dict[str, list[Trajectory]]
    seconds: float


class BackgroundEvaluation:
    """At most one evaluation at a time."""

    def __init__(
        self,
        recipe: Recipe,
        sets: Mapping[str, Sequence[Prompt]],
        stage: RolloutStage,
        engines: EngineGroup,
        progress: Progress,
    ) -> None:
        self._recipe, self._sets, self._stage, self._engines = recipe, sets, stage, engines
        self._progress = progress
        self._running: Future[Evaluated] | None = None
        self._step = 0

    @property
    def step(self) -> int | None:
        """The step of the evaluation that runs; None if none does."""
        return None if self._running is None else self._step

    def begin(self, step: int, weight_version: int, label: str) -> bool:
        """Begin the evaluation of a step, whose weights the engines have as this version. The one before was taken.

        Returns:
            False if the recipe sets no engines aside, or none can be spared now.
        """
        assert self._running is None, f"the evaluation of step {self._step} was not taken"
        most = self._recipe.eval.engines
        if not most or not (num_engines := self._engines.set_aside(most)):
            return False
        self._step = step
        self._running = self._stage.submit(self._evaluate(label, num_engines, weight_version))
        return True

    def take(self) -> Evaluated | None:
        """The evaluation if it has ended; its engines take part in the next resync.

        Raises:
            RunError: too many of its trajectories failed, or other weights sampled some of them.
        """
        if (running := self._running) is None:
            return None
        if not (is_lost := self._engines.evaluation_is_lost) and not running.done():
            return None
        self._running = None
        self._engines.take_back()
        # What failed may have failed by that.
        if is_lost and not (running.done() and running.exception() is None):
            text = f"the evaluation of step {self._step} has lost its engines and is given up"
            log.warning("%s", text)
            self._progress.say(f"warning: {text}")
            running.cancel()
            return None
        return running.result()

    def give_up(self) -> None:
        """End the evaluation that runs, if one does; its engines take part in the next resync."""
        if (running := self._running) is not None:
            self._running = None
            running.cancel()
            self._engines.take_back()

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

    async def _evaluate(self, label: str, num_engines: int, weight_version: int) -> Evaluated:
        """Evaluate every set, one after the other.

        Raises:
            RunError: as `take`.
        """
        start = time.monotonic()
        samples, rollout = self._recipe.eval.samples_per_prompt, self._recipe.rollout
        slots = asyncio.Semaphore(rollout.max_concurrency_per_engine * num_engines)

        async def run(trajectory_id: str, prompt: Prompt) -> Trajectory:
            async with slots:
                return await self._stage.episodes.run(trajectory_id, prompt, rollout.eval_sampling)

        found, sampled = {}, {}
        for name, prompts in self._sets.items():
            planned = planned_trajectories(prompts, samples_per_prompt=samples, label=f"{label}/{name}")
            trajectories = await all_of([run(*each) for each in planned.items()])
            refuse_failures(rollout, f"evaluation {name}", trajectories, len(trajectories))
            versions = {int(v) for t in trajectories for s in t.segments for v in s.weight_versions[s.loss_mask]}
            if other := versions - {weight_version}:
                raise RunError(f"evaluation {name} of weight version {weight_version}: sampled by {sorted(other)} too")
            sampled[name] = trajectories
            keys = item_keys(name, prompts, samples)
            found[name] = [item_of(trajectory, key) for trajectory, key in zip(trajectories, keys, strict=True)]
        return Evaluated(step=self._step, sets=found, trajectories=sampled, seconds=time.monotonic() - start)
