"""The rollout as one call: prompts in, scored trajectories out."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from slimrl.config.schema import Recipe, SamplingConfig
from slimrl.data.protocols import Engine
from slimrl.data.trajectory import Prompt, Status, Trajectory
from slimrl.observability.progress import Progress
from slimrl.rewards.scoring import score
from slimrl.rollout.collector import EpisodeRequest, collect, episode_requests
from slimrl.rollout.evaluate import EvalResult, evaluate
from slimrl.runtime.errors import RunError
from slimrl.runtime.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Trajectories in the order of their prompts and samples."""

    trajectories: list[Trajectory]
    seconds: float


WATCH_S = 1.0
"""Time between two looks at whether the engines still live."""


class RolloutStage:
    """Runs episodes on the engines, on one event loop that lives as long as the stage."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        engine: Engine,
        progress: Progress,
        *,
        watch: Callable[[], None],
        flush_caches: Callable[[], None],
    ) -> None:
        """
        Args:
            engine: what the episodes talk to.
            watch: called every second of a rollout; raises StageError where an engine has ended without which the
                episodes cannot go on.
            flush_caches: empties the engines' prefix caches. A deterministic run calls it before every rollout and
                every evaluation set: what a cache holds decides the shape of a prefill, and so its last bits, and a
                resumed run's engines have not seen what was asked before.
        """
        self._recipe, self._task, self._progress = recipe, task, progress
        self._engine, self._watch, self._flush_caches = engine, watch, flush_caches
        self._episodes = task.episode_runner(recipe, engine)
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._close())
        self._loop.close()

    def rollout(
        self, prompts: Sequence[Prompt], *, label: str, may_go_on: Callable[[], None] | None = None
    ) -> RolloutBatch:
        """`samples_per_prompt` trajectories of each prompt under the training sampling settings.

        Args:
            label: part of every trajectory id; unique in the run.
            may_go_on: called every second; what it raises ends the rollout.

        Raises:
            RunError: more than `rollout.max_failed_fraction` of the trajectories failed.
        """
        requests = episode_requests(
            prompts, samples_per_prompt=self._recipe.rollout.samples_per_prompt, label=label, seed=self._recipe.seed
        )
        return self._collect("rollout", requests, self._recipe.rollout.sampling, may_go_on)

    def evaluate(self, name: str, prompts: Sequence[Prompt], *, label: str) -> tuple[EvalResult, RolloutBatch]:
        """One trajectory of each prompt under the evaluation sampling settings.

        Raises:
            RunError: as `rollout`.
        """
        requests = episode_requests(prompts, samples_per_prompt=1, label=f"{label}/{name}", seed=self._recipe.seed)
        batch = self._collect(f"evaluation {name}", requests, self._recipe.rollout.eval_sampling)
        return evaluate(name, batch.trajectories), batch

    def _collect(
        self,
        name: str,
        requests: Sequence[EpisodeRequest],
        sampling: SamplingConfig,
        may_go_on: Callable[[], None] | None = None,
    ) -> RolloutBatch:
        start = time.monotonic()
        if self._recipe.deterministic:
            self._flush_caches()
        with self._progress.phase(name, len(requests), "trajectories") as phase:

            async def one(request: EpisodeRequest) -> Trajectory:
                return await self._episode(request, sampling)

            def advance(_: Trajectory) -> None:
                phase.advance()

            trajectories = self._loop.run(self._watched(self._play(requests, one, advance), may_go_on))
        _refuse_failures(name, trajectories, self._recipe.rollout.max_failed_fraction)
        return RolloutBatch(trajectories=trajectories, seconds=time.monotonic() - start)

    async def _watched(
        self, play: Coroutine[Any, Any, list[Trajectory]], may_go_on: Callable[[], None] | None
    ) -> list[Trajectory]:
        work = asyncio.create_task(play)
        try:
            while not (await asyncio.wait([work], timeout=WATCH_S))[0]:
                self._watch()
                if may_go_on is not None:
                    may_go_on()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return work.result()

    async def _play(
        self,
        requests: Sequence[EpisodeRequest],
        one: Callable[[EpisodeRequest], Awaitable[Trajectory]],
        on_done: Callable[[Trajectory], None],
    ) -> list[Trajectory]:
        """All episodes, announced to the engine, and as many of them at a time as may be under way."""
        most = self._recipe.rollout.max_concurrency_per_engine * self._recipe.rollout.num_engines
        self._engine.open([request.trajectory_id for request in requests], at_once=most)
        return await collect(requests, one, max_concurrency=most, on_done=on_done)

    async def _close(self) -> None:
        """Ends episodes that an interrupted rollout left under way, then the connections."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._engine.aclose()

    async def _episode(self, request: EpisodeRequest, sampling: SamplingConfig) -> Trajectory:
        trajectory = await self._episodes.run(
            request.prompt, trajectory_id=request.trajectory_id, sampling=sampling, seed=request.seed
        )
        self._engine.close(request.trajectory_id)
        try:
            await score(trajectory, request.prompt, self._task.reward, self._recipe.rollout.trajectory_timeout_s)
        except Exception as error:
            # A task's own code may raise anything. It is named, and how many may fail is for the recipe to say.
            cause = f"{self._recipe.reward.function} failed: {type(error).__name__}: {error}"
            log.warning("%s: %s", request.trajectory_id, cause, exc_info=error)
            trajectory.status = Status.failed
            trajectory.metadata["error"] = cause
        return trajectory


def _refuse_failures(name: str, trajectories: Sequence[Trajectory], limit: float) -> None:
    failed = [t for t in trajectories if t.status in (Status.failed, Status.aborted)]
    if len(failed) > limit * len(trajectories):
        causes = sorted({str(t.metadata.get("error")) for t in failed})
        raise RunError(
            f"{name}: {len(failed)} of {len(trajectories)} trajectories failed or were aborted, more than "
            f"rollout.max_failed_fraction = {limit:g} allows: {'; '.join(causes[:3])}"
        )
