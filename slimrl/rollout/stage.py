"""The rollout as one call: prompts in, scored trajectories out.

1. Each prompt gives `samples_per_prompt` trajectories, whose ids follow from step, prompt and sample.
2. Each trajectory is one coroutine; slots limit how many run at once (rollout/pressure.py). If there are more, they
   begin long-first (rollout/start_order.py), in a deterministic run in order. An episode runs on this event loop, or
   in an episode worker (`agent.workers`).
3. A finished trajectory is rewarded, and if there is a teacher, scored by it.
4. When the last trajectory of a prompt has ended, the rewards of groups are added, but not in an evaluation.
5. The result is ordered by prompt and sample, whichever finished first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from typing import Any, Self

import numpy as np

from slimrl.agent.gateway.server import NotListening
from slimrl.agent.tools import ToolsUnavailable
from slimrl.base.errors import RunError
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, SamplingConfig
from slimrl.data.engine import Engine, Scorer, ScoreRequest
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Prompt, Status, Trajectory
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.teacher import ScoringTimes, Teacher
from slimrl.engines.turn_logs import LoggedTurn, TurnLogs
from slimrl.evaluation.item import Item, item_keys, item_of
from slimrl.evaluation.items import Items
from slimrl.observability.progress import Progress
from slimrl.rewards.groups import PendingGroups
from slimrl.rewards.services import NotStarted, RewardServices
from slimrl.rollout.errors import TooManyFailed
from slimrl.rollout.garbage import rare_collections
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
        workers: Workers | None = None,
        loop: asyncio.Runner | LoopThread | None = None,
        scorer: Scorer | None = None,
        engine_urls: Callable[[], Sequence[str]] = lambda: (),
        engine_key: EngineKey | None = None,
    ) -> None:
        """
        Args:
            engine: client of the engines, for episodes on this event loop.
            watch: called every second of a rollout; raises StageError if an engine ended that the episodes need.
            flush_caches: empties the engines' prefix caches. A deterministic run calls it before every rollout and
                every evaluation set: the cache's content decides the shape of a prefill and so its last bits, and the
                engines of a resumed run have not seen the earlier prompts.
            teacher: scores the trajectories of a rollout, but not those of an evaluation.
            workers: run the episodes instead of this event loop; started and closed with the stage.
            loop: of the episodes; None for one that runs only while a rollout does.
            scorer: the engines, as what scores; None if nothing asks for scores.
            engine_urls: of the engines that there are now, to watch their caches.
            engine_key: of these engines.
        """
        self._recipe, self._task, self._progress = recipe, task, progress
        self._engine, self._watch, self._flush_caches = engine, watch, flush_caches
        self._workers = workers
        self._turn_logs = TurnLogs()
        """Turn logs of the episodes of `run_group`, where no worker has them"""
        logs = self._turn_logs if recipe.rollout.spans_steps else None
        self._runner = workers or task.episode_runner(recipe, engine, logs)
        self.episodes = ScoredEpisodes(recipe, task.rewards, self._runner, engine)
        self._teacher, self._scorer = teacher, scorer
        self.scoring = ScoringTimes()
        """Times of the scores of the last rollout, and of those before it that it refills."""
        self.lags_s: list[float] = []
        """Lags of the event loops of this process and of the workers in the same rollouts; see LoopLag"""
        self._lag = LoopLag()
        self.pressure = CachePressure(recipe.rollout, engine_urls, engine_key)
        self._services = RewardServices(
            task.rewards.parts, timeout_s=recipe.reward.startup_timeout_s, say=lambda text: progress.say(text)
        )
        self._service_tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.Runner() if loop is None else loop
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

    def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        label: str,
        check_cancelled: Callable[[], None] = lambda: None,
        earlier: Sequence[Trajectory] = (),
    ) -> list[Trajectory]:
        """`samples_per_prompt` trajectories of each prompt under the training sampling settings.

        Args:
            label: part of every trajectory id, for example `step_000012`; unique in the run.
            earlier: those of the step before this rollout; they count in the fraction that may fail.
            check_cancelled: called every second; an exception that it raises ends the rollout.

        Raises:
            TooManyFailed: more than `rollout.max_failed_fraction` of the trajectories did.
        """
        if not earlier:
            self.scoring, self.lags_s = ScoringTimes(), []
        samples = self._recipe.rollout.samples_per_prompt
        planned = planned_trajectories(prompts, samples_per_prompt=samples, label=label)
        sampling = self._recipe.rollout.sampling
        return self._collect("rollout", planned, sampling, check_cancelled, earlier, trains=True)

    def evaluate(
        self,
        name: str,
        prompts: Sequence[Prompt],
        *,
        label: str,
        items: Items | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Item]:
        """`eval.samples_per_prompt` trajectories of each prompt under the evaluation sampling settings.

        Args:
            items: those that are finished already, which are not sampled again; gets the others as they end. A
                deterministic run samples a set again of which one is missing: the batches in which its trajectories
                are computed depend on all of them.
            check: called every second; an exception that it raises ends the evaluation.

        Returns:
            The set's items by prompt and sample.

        Raises:
            TooManyFailed: as `rollout`.
        """
        items = items or Items()
        self.lags_s = []
        samples = self._recipe.eval.samples_per_prompt
        keys = item_keys(name, prompts, samples)
        planned = planned_trajectories(prompts, samples_per_prompt=samples, label=f"{label}/{name}")
        key_of = dict(zip(planned, keys, strict=True))
        missing = set(items.missing(keys))
        if missing and self._recipe.deterministic:
            missing = set(keys)
        left = {trajectory_id: prompt for trajectory_id, prompt in planned.items() if key_of[trajectory_id] in missing}

        def keep(trajectory: Trajectory) -> None:
            items.add(item_of(trajectory, key_of[trajectory.trajectory_id]))

        if left:
            sampling = self._recipe.rollout.eval_sampling
            num_done = len(planned) - len(left)
            self._collect(f"evaluation {name}", left, sampling, check, on_done=keep, num_done=num_done)
        return items.of(keys)

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the episodes' event loop."""
        return self._loop.run(coroutine)

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on that event loop, while the groups of `run_group` go on."""
        assert isinstance(self._loop, LoopThread), "nothing runs between two calls"
        return self._loop.submit(coroutine)

    def run_watched[T](self, coroutine: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
        """The result of a coroutine on that event loop, while the groups of `run_group` go on.

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
        """Times of the scores since the last call, and the mean tail, where groups do not run in rollouts of their
        own."""
        taken, self.scoring = self.scoring, ScoringTimes()
        tails_s = [sum(taken.tails_s) / len(taken.tails_s)] if taken.tails_s else []
        return ScoringTimes(scores_s=taken.scores_s, tails_s=tails_s)

    async def score(self, request: ScoreRequest) -> np.ndarray:
        """Log-probs of the engines' present weights; see Scorer."""
        assert self._scorer is not None
        return await self._scorer.score(request)

    async def run_group(
        self,
        prompt: Prompt,
        trajectory_ids: Sequence[str],
        done: Mapping[str, Trajectory],
        slots: Slots,
        keep: Callable[[Trajectory], None],
        saved: Mapping[str, Sequence[LoggedTurn]],
    ) -> None:
        """Run the episodes of a group to train on, until all of them are scored.

        Args:
            trajectory_ids: unique in the run.
            done: scored trajectories by their ids, which do not run again.
            slots: of all trajectories that may run at a time.
            keep: called with each scored trajectory, which is in `done` afterwards.
            saved: turns of an earlier run, by the ids of trajectories that ran when it ended; see `turns`.
        """
        self._lag.resume()
        logs = self._workers or self._turn_logs
        last_end = 0.0

        async def run(trajectory_id: str) -> None:
            nonlocal last_end
            async with slots:
                started = time.time()
                trajectory = await self.episodes.run(trajectory_id, prompt, self._recipe.rollout.sampling)
            last_end = time.monotonic()
            if self._teacher is not None:
                seconds = await self.episodes.score_by(self._teacher, trajectory)
                self.scoring.scores_s += seconds
            trajectory.measured |= {STARTED_AT: started, ENDED_AT: time.time()}
            keep(trajectory)
            logs.forget(trajectory_id)

        left = [trajectory_id for trajectory_id in trajectory_ids if trajectory_id not in done]
        for trajectory_id in left:
            logs.begin(trajectory_id, saved.get(trajectory_id, ()))
        try:
            await all_of([run(trajectory_id) for trajectory_id in left])
        finally:
            for trajectory_id in left:
                logs.forget(trajectory_id)
        if left and self._teacher is not None:
            self.scoring.tails_s.append(time.monotonic() - last_end)
        if self._task.rewards.group:
            await self.episodes.score_group([done[trajectory_id] for trajectory_id in trajectory_ids], prompt)

    async def turns(self) -> Mapping[str, Sequence[LoggedTurn]]:
        """What engines have answered to the trajectories of `run_group` that are not scored yet, by their ids."""
        return self._turn_logs.snapshot() if self._workers is None else await self._workers.turns()

    def _collect(
        self,
        name: str,
        planned: Mapping[str, Prompt],
        sampling: SamplingConfig,
        check: Callable[[], None] = lambda: None,
        earlier: Sequence[Trajectory] = (),
        *,
        trains: bool = False,
        on_done: Callable[[Trajectory], None] = lambda trajectory: None,
        num_done: int = 0,
    ) -> list[Trajectory]:
        """
        Args:
            on_done: called with each trajectory as it ends.
            num_done: trajectories that ended well in an interrupted evaluation; they count as `earlier` does.
        """
        if self._recipe.deterministic:
            self._flush_caches()
        with self._progress.phase(name, len(planned), "trajectories") as phase:

            def advance(trajectory: Trajectory) -> None:
                on_done(trajectory)
                phase.advance()

            def look() -> None:
                self._watch()
                check()

            episodes = self._run_episodes(planned, sampling, advance, trains=trains)
            if isinstance(self._loop, LoopThread):
                trajectories = self.run_watched(episodes, look)
            else:
                trajectories = self._loop.run(_watched(episodes, look))
        counted = [*earlier, *trajectories]
        refuse_failures(self._recipe.rollout, name, counted, num_done + len(counted))
        return trajectories

    async def _run_episodes(
        self,
        planned: Mapping[str, Prompt],
        sampling: SamplingConfig,
        on_done: Callable[[Trajectory], None],
        *,
        trains: bool,
    ) -> list[Trajectory]:
        """Run all episodes; their trajectories in the order of `planned`. Those to train on are scored by the teacher,
        if there is one, and get the rewards of their groups.

        An exception of one episode (a fault of ours, since the failure of an engine, a tool or a reward is a status)
        cancels the others and is raised.
        """
        max_concurrency = self._recipe.rollout.max_concurrency_per_engine * self._recipe.rollout.most_engines
        self._engine.open(list(planned), at_once=max_concurrency)
        slots = self.pressure.slots()
        teacher = self._teacher if trains else None
        groups = PendingGroups(planned) if trains and self._task.rewards.group else None
        order = StartOrder(
            {one: group_name(one) for one in planned},
            long_first=not self._recipe.deterministic and len(planned) > slots.limit,
        )
        last_end = 0.0

        async def run() -> Trajectory:
            nonlocal last_end
            async with slots:
                trajectory_id = order.begin(time.monotonic())
                started, prompt = time.time(), planned[trajectory_id]
                trajectory = await self.episodes.run(trajectory_id, prompt, sampling)
                order.end(trajectory_id, time.monotonic())
            last_end = time.monotonic()
            if groups is not None and (ended := groups.add(trajectory)):
                await self.episodes.score_group(ended, prompt)
            if teacher is not None:
                seconds = await self.episodes.score_by(teacher, trajectory)
                self.scoring.scores_s += seconds
            trajectory.measured |= {STARTED_AT: started, ENDED_AT: time.time()}
            on_done(trajectory)
            return trajectory

        self._lag.resume()
        try:
            ended = await all_of([run() for _ in planned])
        finally:
            # Beside groups that run by themselves the loop is measured all the time.
            if not self._recipe.rollout.spans_steps:
                self._lag.pause()
                self.lags_s += self.take_lags()
        if teacher is not None:
            self.scoring.tails_s.append(time.monotonic() - last_end)
        by_id = {trajectory.trajectory_id: trajectory for trajectory in ended}
        return [by_id[trajectory_id] for trajectory_id in planned]

    async def _start(self) -> None:
        if self._teacher is not None:
            self._opened.push_async_callback(self._teacher.aclose)
        self._opened.push_async_callback(self._engine.aclose)
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


async def _watched[T](work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """The result of a coroutine; `check` is called at first and every second, and an exception that it raises ends the
    coroutine."""
    task = asyncio.create_task(work)
    try:
        check()
        while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
            check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return task.result()


def refuse_failures(rollout: RolloutConfig, name: str, ended: Sequence[Trajectory], num_counted: int) -> None:
    """Raises TooManyFailed if too many of `num_counted` trajectories failed, all of which are among `ended`."""
    failed = [t for t in ended if t.status in (Status.failed, Status.aborted)]
    limit = rollout.max_failed_fraction
    if len(failed) > limit * num_counted:
        raise TooManyFailed(
            f"{name}: {len(failed)} of {num_counted} trajectories failed or were aborted, more than "
            f"rollout.max_failed_fraction = {limit:g} allows: {causes_text(failed)}",
            failed,
        )


def causes_text(failed: Sequence[Trajectory]) -> str:
    """Why trajectories failed, at most three causes."""
    return "; ".join(sorted({str(t.metadata.get("error")) for t in failed})[:3])


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


def group_name(trajectory_id: str) -> str:
    """Common part of the ids of a prompt's trajectories; see `planned_trajectories`."""
    return trajectory_id.rsplit("/", 1)[0]


def planned_trajectories(prompts: Sequence[Prompt], *, samples_per_prompt: int, label: str) -> dict[str, Prompt]:
    """The prompt of each trajectory by its id, ordered by prompt and sample."""
    return {
        f"{label}/{position:05d}/{sample:03d}": prompt
        for position, prompt in enumerate(prompts)
        for sample in range(samples_per_prompt)
    }
