"""The episodes of a run, all on one event loop, which has a thread of its own, or in episode workers.

1. Each trajectory is one coroutine; slots limit how many run at once (rollout/pressure.py). If there are more, those of
   one call begin long-first (rollout/start_order.py), in a deterministic run in order.
2. A finished trajectory is rewarded, and if there is a teacher, scored by it.
3. When the last trajectory of a group has ended, the rewards of groups are added, but not in an evaluation.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from typing import Any, Self

import numpy as np

from slimrl.agent.gateway.server import NotListening
from slimrl.agent.tools import ToolsUnavailable
from slimrl.base.errors import RunError
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine, Scorer, ScoreRequest
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Trajectory
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.teacher import ScoringTimes, Teacher
from slimrl.engines.turn_logs import LoggedTurn, TurnLogs
from slimrl.evaluation.item import Item, item_keys, item_of
from slimrl.evaluation.items import Items
from slimrl.observability.progress import Progress
from slimrl.rewards.services import NotStarted, RewardServices
from slimrl.rollout.episode_counts import EpisodeCounts
from slimrl.rollout.errors import refuse_failures
from slimrl.rollout.garbage import rare_collections
from slimrl.rollout.groups import Group
from slimrl.rollout.loop_lag import LoopLag
from slimrl.rollout.pressure import CachePressure
from slimrl.rollout.scored_episodes import ScoredEpisodes, Workers
from slimrl.rollout.slots import Slots
from slimrl.rollout.start_order import StartOrder
from slimrl.rollout.task.task import Task

log = logging.getLogger(__name__)

END_S = 10.0
"""Seconds for cancelled episodes to end, beyond the deadline of their environment's close."""
WATCH_S = 1.0
"""Seconds between two checks that the engines are alive."""


class RolloutStage:
    """Runs episodes on the engines, all on one event loop or in episode workers."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        engine: Engine,
        progress: Progress,
        *,
        watch: Callable[[], None],
        flush_caches: Callable[[], None],
        teacher: Teacher | None = None,
        past: Engine | None = None,
        workers: Workers | None = None,
        scorer: Scorer | None = None,
        engine_urls: Callable[[], Sequence[str]] = lambda: (),
        engine_key: EngineKey | None = None,
    ) -> None:
        """
        Args:
            engine: client of the engines, for episodes on this event loop.
            watch: called every second of a rollout; raises StageError if an engine ended that the episodes need.
            flush_caches: empties the engines' prefix caches; see `flush_if_deterministic`.
            teacher: scores the trajectories of a rollout, but not those of an evaluation.
            past: client of the engines of older versions of the policy, as `engine`.
            workers: run the episodes instead of this event loop; started and closed with the stage.
            scorer: the engines, as what scores; None if nothing asks for scores.
            engine_urls: of the engines that there are now, to watch their caches.
            engine_key: of these engines.
        """
        self._recipe, self._task, self._progress = recipe, task, progress
        self._engine, self._watch, self._flush_caches = engine, watch, flush_caches
        self._past, self._workers = past, workers
        self._turn_logs = TurnLogs() if recipe.rollout.spans_steps else None
        """Turn logs of the episodes of groups that may outlive a step, where no worker has them"""
        self._runner = workers or task.episode_runner(recipe, engine, self._turn_logs, past)
        self.episodes = ScoredEpisodes(recipe, task.rewards, self._runner, engine, task.roles)
        self._teacher, self._scorer = teacher, scorer
        self._scoring = ScoringTimes()
        self._lag = LoopLag()
        self.counts = EpisodeCounts()
        self._num_runs = 0
        """Number of `_run_episodes` under way"""
        self.pressure = CachePressure(recipe.rollout, engine_urls, engine_key)
        self._services = RewardServices(
            task.rewards.parts, timeout_s=recipe.reward.startup_timeout_s, say=lambda text: progress.say(text)
        )
        self._service_tasks: set[asyncio.Task[Any]] = set()
        self._loop = LoopThread("slimrl-rollout")
        self._opened = AsyncExitStack()
        """Stack of what was started: closes it in reverse order, each part whatever becomes of the others"""

    def __enter__(self) -> Self:
        """Start the rewards and the workers; raises RunError if one does not start."""
        try:
            self._loop.run(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        have_ended = self._loop.run(self._end_episodes())
        try:
            self._loop.run(self._opened.aclose())
        finally:
            if have_ended:
                # The close of a loop would wait for tasks that do not end.
                self._loop.close()

    def flush_if_deterministic(self) -> None:
        """Empty the engines' prefix caches before a rollout or an evaluation set of a deterministic run: the cache's
        content decides the shape of a prefill and so its last bits, and the engines of a resumed run have not seen the
        earlier prompts."""
        if self._recipe.deterministic:
            self._flush_caches()

    def rollout(self, prompts: Sequence[Prompt], *, label: str) -> list[Trajectory]:
        """`samples_per_prompt` trajectories of each prompt to train on, by prompt and sample, without a service.

        Args:
            label: part of every trajectory id, for example `step_000012`; unique in the run.

        Raises:
            TooManyFailed: more than `rollout.max_failed_fraction` of the trajectories did.
        """
        samples = range(self._recipe.rollout.samples_per_prompt)
        groups = [
            Group(number=n, prompt=prompt, ids=[f"{label}/{n:05d}/{sample:03d}" for sample in samples])
            for n, prompt in enumerate(prompts)
        ]
        self.flush_if_deterministic()
        self.run_watched(self.run_groups(groups, None), self.check)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        refuse_failures(self._recipe.rollout, "rollout", trajectories, len(trajectories))
        return trajectories

    def evaluate(
        self,
        name: str,
        prompts: Sequence[Prompt],
        *,
        label: str,
        items: Items | None = None,
        check: Callable[[], None] = lambda: None,
        seen: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> list[Item]:
        """`eval.samples_per_prompt` trajectories of each prompt under the evaluation sampling settings.

        Args:
            items: those that are finished already, which are not sampled again; gets the others as they end. A
                deterministic run samples a set again of which one is missing: the batches in which its trajectories
                are computed depend on all of them.
            check: called every second; an exception that it raises ends the evaluation.
            seen: called with each trajectory that ends.

        Returns:
            The set's items by prompt and sample.

        Raises:
            TooManyFailed: as `rollout`.
        """
        items = items or Items()
        samples = self._recipe.eval.samples_per_prompt
        keys = item_keys(name, prompts, samples)
        planned = planned_trajectories(prompts, samples_per_prompt=samples, label=f"{label}/{name}")
        key_of = dict(zip(planned, keys, strict=True))
        missing = set(items.missing(keys))
        if missing and self._recipe.deterministic:
            missing = set(keys)
        left = {trajectory_id: prompt for trajectory_id, prompt in planned.items() if key_of[trajectory_id] in missing}

        def look() -> None:
            self.check()
            check()

        if left:
            self.flush_if_deterministic()
            with self._progress.phase(f"evaluation {name}", len(left), "trajectories") as phase:
                trajectories: list[Trajectory] = []

                async def keep(trajectory: Trajectory) -> None:
                    trajectories.append(trajectory)
                    seen(trajectory)
                    items.add(item_of(trajectory, key_of[trajectory.trajectory_id]))
                    phase.advance()

                sampling = self._recipe.rollout.eval_sampling
                self.run_watched(self._run_episodes(left, sampling, None, keep), look)
            refuse_failures(self._recipe.rollout, f"evaluation {name}", trajectories, len(planned))
        return items.of(keys)

    def play(self, name: str, planned: Mapping[str, Prompt]) -> list[Trajectory]:
        """A trajectory of each prompt under the evaluation sampling settings, in the order in which they end.

        Args:
            name: of what is played, for the progress and for errors.
            planned: prompts by the ids of their trajectories.

        Raises:
            TooManyFailed: as `rollout`.
        """
        self.flush_if_deterministic()
        trajectories: list[Trajectory] = []
        with self._progress.phase(name, len(planned), "trajectories") as phase:

            async def keep(trajectory: Trajectory) -> None:
                trajectories.append(trajectory)
                phase.advance()

            self.run_watched(self._run_episodes(planned, self._recipe.rollout.eval_sampling, None, keep), self.check)
        refuse_failures(self._recipe.rollout, name, trajectories, len(planned))
        return trajectories

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the episodes' event loop."""
        return self._loop.run(coroutine)

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on that event loop, beside what runs there."""
        return self._loop.submit(coroutine)

    def run_watched[T](self, coroutine: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
        """The result of a coroutine on that event loop, beside what runs there.

        Args:
            check: called at first and every second in this thread, so that a health check does not block rollouts; an
                exception that it raises ends the coroutine.
        """
        work = self.submit(coroutine)
        try:
            check()
            while not wait([work], timeout=WATCH_S).done:
                check()
        finally:
            work.cancel()
        return work.result()

    def check(self) -> None:
        """Raises StageError if an engine ended that the episodes need."""
        self._watch()

    def take_lags(self) -> list[float]:
        """Seconds by which the event loops were late since the last call; see LoopLag."""
        return [*self._lag.take(), *(() if self._workers is None else self._workers.take_lags())]

    def take_scoring(self) -> ScoringTimes:
        """Times of the scores since the last call; of the tails the mean, where groups run beside the training."""
        taken, self._scoring = self._scoring, ScoringTimes()
        if taken.tails_s and self._recipe.rollout.spans_steps:
            return replace(taken, tails_s=[sum(taken.tails_s) / len(taken.tails_s)])
        return taken

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """Log-probs of the engines' present weights; see Scorer."""
        assert self._scorer is not None
        return await self._scorer.score(request)

    async def run_groups(
        self,
        groups: Sequence[Group],
        slots: Slots | None,
        kept: Callable[[], None] = lambda: None,
        ended: Callable[[Group], None] = lambda group: None,
        saved: Mapping[str, Sequence[LoggedTurn]] | None = None,
    ) -> None:
        """Run the episodes of groups to train on that are not scored yet, until all of them are.

        An exception of one episode (a fault of ours, since the failure of an engine, a tool or a reward is a status)
        cancels the others and is raised.

        Args:
            groups: get their trajectories; the ids are unique in the run.
            slots: of all trajectories that may run at a time; None for new ones.
            kept: called after each scored trajectory.
            ended: called with each group when all its trajectories and the rewards of the group are there.
            saved: turns of an earlier run, by the ids of trajectories that ran when it ended; see `turns`.
        """
        group_of = {one: group for group in groups for one in group.left}
        logs = self._workers or self._turn_logs if self._recipe.rollout.spans_steps else None
        last_end = 0.0

        async def end(group: Group) -> None:
            if self._task.rewards.group:
                await self.episodes.score_group(group.trajectories, group.prompt)
            ended(group)

        async def keep(trajectory: Trajectory) -> None:
            nonlocal last_end
            last_end = time.monotonic()
            if self._teacher is not None:
                scores_s = await self.episodes.score_by(self._teacher, trajectory)
                self._scoring.scores_s += scores_s  # in a statement of its own, since `take_scoring` may run meanwhile
                trajectory.measured[ENDED_AT] = time.time()
            group = group_of[trajectory.trajectory_id]
            group.keep(trajectory)
            if phase is not None:
                phase.advance()
            kept()
            if logs is not None:
                logs.forget(trajectory.trajectory_id)
            if not group.left:
                await end(group)

        if logs is not None:
            for one in group_of:
                logs.begin(one, (saved or {}).get(one, ()))
        # Groups one by one, of which there may be hundreds, are not shown.
        shown = self._progress.phase("rollout", len(group_of), "trajectories") if len(groups) > 1 else nullcontext()
        with shown as phase:
            try:
                for group in groups:
                    if not group.left:
                        await end(group)
                planned = {one: group.prompt for one, group in group_of.items()}
                await self._run_episodes(planned, self._recipe.rollout.sampling, slots, keep)
            finally:
                if logs is not None:
                    for one in group_of:
                        logs.forget(one)
        if group_of and self._teacher is not None:
            self._scoring.tails_s.append(time.monotonic() - last_end)

    async def turns(self) -> Mapping[str, Sequence[LoggedTurn]]:
        """What engines have answered to the trajectories of `run_groups` that are not scored yet, by their ids."""
        if self._workers is not None:
            return await self._workers.turns()
        return {} if self._turn_logs is None else self._turn_logs.snapshot()

    async def _run_episodes(
        self,
        planned: Mapping[str, Prompt],
        sampling: SamplingConfig,
        slots: Slots | None,
        keep: Callable[[Trajectory], Awaitable[None]],
    ) -> None:
        """Run all episodes, and await `keep` with the trajectory of each, which has its own reward."""
        rollout = self._recipe.rollout
        # On this loop, on which `pressure` goes through all slots.
        slots = slots or self.pressure.slots()
        self._engine.open(list(planned), at_once=rollout.max_concurrency_per_engine * rollout.most_engines)
        order = StartOrder(
            {one: one.rsplit("/", 1)[0] for one in planned},
            long_first=not self._recipe.deterministic and len(planned) > slots.limit,
        )

        async def run() -> None:
            async with slots:
                trajectory_id = order.begin(time.monotonic())
                started = time.time()
                self.counts.begin(trajectory_id)
                try:
                    trajectory = await self.episodes.run(trajectory_id, planned[trajectory_id], sampling)
                finally:
                    self.counts.end(trajectory_id)
                self.counts.add(trajectory)
                order.end(trajectory_id, time.monotonic())
            trajectory.measured |= {STARTED_AT: started, ENDED_AT: time.time()}
            await keep(trajectory)

        self._num_runs += 1
        self._lag.resume()
        try:
            await all_of([run() for _ in planned])
        finally:
            self._num_runs -= 1
            if not self._num_runs:
                self._lag.pause()

    async def _start(self) -> None:
        if self._teacher is not None:
            self._opened.push_async_callback(self._teacher.aclose)
        for engine in (self._engine, self._past):
            if engine is not None:
                self._opened.push_async_callback(engine.aclose)
        self._opened.push_async_callback(self._task.sandbox.close)
        try:
            self._opened.push_async_callback(self._services.close)
            await self._services.start()
            self._keep_tasks()
            self._opened.push_async_callback(self._runner.stop)
            await self._runner.start()
            if not self._recipe.deterministic:
                watch = asyncio.create_task(self.pressure.watch())
                self._opened.push_async_callback(_end, watch)
            self._keep_tasks()
        except (NotStarted, ToolsUnavailable, NotListening) as error:
            raise RunError(str(error)) from error
        self._opened.enter_context(rare_collections())

    def _keep_tasks(self) -> None:
        """Take what runs now for a part of what was started, which its own close ends."""
        self._service_tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    async def _end_episodes(self) -> bool:
        """Cancel episodes that an interrupted rollout left running.

        Returns:
            Whether all of them have ended: a task's own code may ignore that it is cancelled.
        """
        left = asyncio.all_tasks() - {asyncio.current_task()} - self._service_tasks
        for task in left:
            task.cancel()
        if left:
            ended = asyncio.gather(*left, return_exceptions=True)
            await asyncio.wait([ended], timeout=self._recipe.agent.close_timeout_s + END_S)
            if stuck := sum(not task.done() for task in left):
                log.warning("%d calls of the task's own code do not end when they are cancelled; left behind", stuck)
        return all(task.done() for task in left)


async def all_of[T](coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several coroutines; the first exception cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in coroutines]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def planned_trajectories(prompts: Sequence[Prompt], *, samples_per_prompt: int, label: str) -> dict[str, Prompt]:
    """The prompt of each trajectory by its id, ordered by prompt and sample."""
    return {
        f"{label}/{position:05d}/{sample:03d}": prompt
        for position, prompt in enumerate(prompts)
        for sample in range(samples_per_prompt)
    }
