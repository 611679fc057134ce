"""Episode workers from the driver's side: Ray actors on its node that run the episodes (`agent.workers`).

1. An episode goes to the worker with the fewest. Its trajectory comes back when it has ended; rewards, those of groups
   and the teacher's scores follow in the driver, so that their connections and caches exist once.
2. A worker that ends takes its episodes with it: they fail with its cause, which counts for
   `rollout.max_failed_fraction`. The next episode that it gets starts it again.
3. One whose event loop is blocked beyond all deadlines of an episode is ended.
4. Messages that come up during a call go together in the next one, and so do trajectories on their way back.
5. A worker logs the turns of its episodes (engines/turn_logs.py) until the driver has no need of them.
"""

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.agent.episode_end import failed_trajectory
from slimrl.base.errors import StageError
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.process import last_error
from slimrl.engines.turn_logs import LoggedTurn
from slimrl.rollout.episode_worker import Cancel, Ended, EpisodeWorker, Forget, Job, Message, Use

GRACE_S = 30.0
"""Seconds beyond the deadlines of an episode until its worker is killed; also those of a worker's close beyond that of
an environment."""
TURNS_S = 10.0
"""Deadline for a worker to send the logs of its episodes' turns"""
LOST = (RayActorError, OutOfMemoryError)
"""What a call raises whose process has ended"""

_Actor = ray.remote(EpisodeWorker)

log = logging.getLogger(__name__)


class WorkerEnded(Exception):
    """A worker ended while it ran an episode; the message has the cause."""


class WorkerFault(Exception):
    """An exception in a worker that is neither the engine's nor the task's; the message is its traceback."""


class EpisodeWorkers:
    """All workers of a run. `run` is that of EpisodeRunner."""

    def __init__(self, loaded: LoadedRecipe, engine: Engine, logs: Path, past: Engine | None = None) -> None:
        """
        Args:
            engine: client of the engines, not connected yet; each worker gets a copy, and is told which may serve.
            logs: folder for the workers' output.
            past: client of the engines of older versions of the policy, not connected yet either.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = [_Worker(index, loaded, engine, logs, past) for index in range(loaded.recipe.agent.workers)]
        if isinstance(engine, RoutedEngines):
            engine.follow(self._tell_engines)
        self._saved: dict[str, Sequence[LoggedTurn]] = {}
        """Turns of an earlier run, by trajectory, for the trajectories to log"""

    async def start(self) -> None:
        """Start the workers. Raises StageError: a worker does not start."""
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(*(worker.ready() for worker in self._workers))

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory:
        """Run an episode in a worker; see EpisodeRunner.run.

        Raises:
            StageError: a worker that had ended does not start again.
            WorkerFault: the worker failed by a fault of ours.
        """
        worker = min(self._workers, key=lambda each: each.num_jobs)
        saved = self._saved.get(trajectory_id)
        job = Job(trajectory_id=trajectory_id, prompt=prompt, sampling=sampling, seed=seed, saved=saved)
        try:
            content = await worker.run(job)
        except WorkerEnded as error:
            cause = str(error)
        else:
            try:
                return pickle.loads(content)  # type: ignore[no-any-return]
            except Exception as error:  # noqa: BLE001 - what an object of the task's own raises is of any type
                where = "in the driver, where rewards run with agent.workers above 1"
                cause = f"scratch cannot be read {where}: {error!r}"
        log.warning("%s: %s", trajectory_id, cause)
        return failed_trajectory(prompt, trajectory_id, cause)

    def begin(self, trajectory_id: str, saved: Sequence[LoggedTurn] = ()) -> None:
        """Log the turns of a trajectory from now on; call it before `run`. See TurnLogs."""
        self._saved[trajectory_id] = saved

    def forget(self, trajectory_id: str) -> None:
        """Drop the log of a trajectory; see TurnLogs."""
        if self._saved.pop(trajectory_id, None) is not None:
            for worker in self._workers:
                worker.send(Forget(trajectory_id=trajectory_id))

    async def turns(self) -> dict[str, Sequence[LoggedTurn]]:
        """The turns of all logged trajectories, by trajectory; see RolloutStage.turns."""
        found = dict(self._saved)
        for of_worker in await asyncio.gather(*(worker.turns() for worker in self._workers)):
            found |= of_worker
        # What was forgotten meanwhile may be there still.
        return {name: turns for name, turns in found.items() if name in self._saved}

    def take_lags(self) -> tuple[float, ...]:
        """Lags of the workers' event loops in seconds since the last call."""
        return tuple(lag for worker in self._workers for lag in worker.take_lags())

    async def stop(self) -> None:
        """End the workers: what runs there is cancelled, and its environments are closed."""
        self._loop = None
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _tell_engines(self) -> None:
        """Tell the workers which engines may serve; may be called from any thread."""
        if (loop := self._loop) is not None:
            for worker in self._workers:
                loop.call_soon_threadsafe(worker.tell_engines)


@dataclass(eq=False)
class _Process:
    """A process of a worker, which may have others after it."""

    actor: Any
    log_file: Path
    pid: int = 0
    jobs: dict[str, asyncio.Future[Ended]] = field(default_factory=dict)
    outbox: list[Message] = field(default_factory=list)
    is_filled: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether the outbox has something"""
    talk: asyncio.Task[None] | None = None
    ending: str = ""
    """How it ended, once that is known"""

    def send(self, message: Message) -> None:
        self.outbox.append(message)
        self.is_filled.set()

    async def deliver(self) -> None:
        """Bring messages to the worker, one call at a time."""
        while await self.is_filled.wait():
            self.is_filled.clear()
            messages, self.outbox = self.outbox, []
            await self.actor.take.remote(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))

    async def collect(self, on_ended: Callable[[Ended], None]) -> None:
        """Take the episodes that end."""
        while True:
            for ended in pickle.loads(await self.actor.ended.remote()):
                on_ended(ended)


class _Worker:
    """One worker: its process, once it is needed."""

    def __init__(self, index: int, loaded: LoadedRecipe, engine: Engine, logs: Path, past: Engine | None) -> None:
        self._name, self._log_stem = f"episode worker {index}", f"episodes_{index}"
        self._loaded, self._engine, self._logs, self._past = loaded, engine, logs, past
        agent, rollout = loaded.recipe.agent, loaded.recipe.rollout
        starts_s = (1 + agent.start_retries) * (agent.start_timeout_s + agent.close_timeout_s)
        self._deadline_s = starts_s + rollout.trajectory_timeout_s + agent.close_timeout_s + GRACE_S
        self._close_s, self._startup_s = agent.close_timeout_s + GRACE_S, rollout.startup_timeout_s
        self._num_starts = 0
        self._process: _Process | None = None
        """The one that episodes go to; None before it is ready and after its end"""
        self._starting = asyncio.Lock()
        self._lags_s: list[float] = []
        self.num_jobs = 0
        """Number of the worker's episodes, those that wait for its start included"""

    def take_lags(self) -> list[float]:
        taken, self._lags_s = self._lags_s, []
        return taken

    def send(self, message: Message) -> None:
        """Send a message if there is a process; a new one has no need of earlier messages."""
        if self._process is not None:
            self._process.send(message)

    def tell_engines(self) -> None:
        """Tell the worker which engines may serve now; one that is not ready will be told when it is."""
        if isinstance(self._engine, RoutedEngines):
            urls, evaluating = self._engine.in_use
            self.send(Use(urls=urls, evaluating=evaluating))

    async def ready(self) -> _Process:
        """The worker's process, started if there is none.

        Raises:
            StageError: it ended, found a problem, or was not ready before `rollout.startup_timeout_s`.
        """
        async with self._starting:
            # Ray tells of the end of an idle one later.
            if self._process is None or not psutil.pid_exists(self._process.pid):
                self._process = await self._started()
                self._process.talk = asyncio.create_task(self._talk(self._process))
                self.tell_engines()
            return self._process

    async def run(self, job: Job) -> bytes:
        """The pickled trajectory of an episode.

        Raises:
            StageError: the worker does not start.
            WorkerEnded: it ended before the episode.
            WorkerFault: it failed by a fault of ours.
        """
        self.num_jobs += 1
        try:
            ended = await self._outcome(await self.ready(), job)
        finally:
            self.num_jobs -= 1
        if ended.fault:
            raise WorkerFault(f"{self._name}: {ended.fault}")
        return ended.trajectory

    async def _outcome(self, process: _Process, job: Job) -> Ended:
        process.jobs[job.trajectory_id] = ended = asyncio.get_running_loop().create_future()
        process.send(job)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await ended
        except TimeoutError:
            late = f"it did not answer within {self._deadline_s:g} s, so code that does not await blocks it"
            process.ending = process.ending or f"{self._name} was ended: {late}"
            self._end(process)
            raise WorkerEnded(process.ending) from None
        except asyncio.CancelledError:
            process.send(Cancel(trajectory_id=job.trajectory_id))
            raise
        finally:
            del process.jobs[job.trajectory_id]

    async def turns(self) -> dict[str, list[LoggedTurn]]:
        """The logs of its trajectories; none if it has ended or does not answer."""
        if self._process is None:
            return {}
        try:
            async with asyncio.timeout(TURNS_S):
                return await self._process.actor.turns.remote()  # type: ignore[no-any-return]
        except (TimeoutError, RayError) as error:
            log.warning("%s: a run that continues from here samples its episodes again: %r", self._name, error)
            return {}

    async def close(self) -> None:
        """End the process once it has closed its environments, or at the deadline for that."""
        if (process := self._process) is None:
            return
        try:
            async with asyncio.timeout(self._close_s):
                await process.actor.close.remote()
        except (TimeoutError, RayError) as error:
            log.warning("%s did not close within %g s: %r", self._name, self._close_s, error)
        if process.talk is not None:
            process.talk.cancel()
        self._end(process)

    async def _started(self) -> _Process:
        suffix = f"_{self._num_starts}" if self._num_starts else ""
        self._num_starts += 1
        log_file = (self._logs / f"{self._log_stem}{suffix}.log").absolute()
        log_file.unlink(missing_ok=True)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Temporary files go where those of the cluster's other processes go.
        variables = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        actor: Any = _Actor.options(num_cpus=0, scheduling_strategy=here).remote(
            self._name, log_file, Path.cwd(), list(sys.path)
        )
        process = _Process(actor, log_file)
        with ExitStack() as unless_ready:
            unless_ready.callback(ray.kill, actor)
            try:
                async with asyncio.timeout(self._startup_s):
                    process.pid = await actor.start.remote(self._loaded, self._engine, variables, self._past)
            except RayTaskError as error:  # may be a TimeoutError too
                raise StageError(f"{self._name}: {error.cause}", str(error)) from error
            except LOST as error:
                raise StageError(self._ending(process), str(error)) from error
            except TimeoutError as error:
                raise StageError(f"{self._name} was not ready within {self._startup_s:g} s") from error
            unless_ready.pop_all()
        log.info("process %d: %s", process.pid, self._name)
        return process

    async def _talk(self, process: _Process) -> None:
        """Send and receive until the process ends; then fail what waits for it."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(process.deliver())
                both.create_task(process.collect(partial(self._take, process)))
        except* Exception as failures:  # noqa: BLE001 - what waits is told of it
            first = failures.exceptions[0]
            self._end(process)
            lost = isinstance(first, LOST)
            for waiting in process.jobs.values():
                if not waiting.done():
                    fault = WorkerFault(f"{type(first).__name__}: {first}")
                    waiting.set_exception(WorkerEnded(self._ending(process)) if lost else fault)

    def _take(self, process: _Process, ended: Ended) -> None:
        self._lags_s += ended.lags_s
        if (waiting := process.jobs.get(ended.trajectory_id)) is not None and not waiting.done():
            waiting.set_result(ended)

    def _end(self, process: _Process) -> None:
        """Kill a process, whatever its state; the next episode starts another one."""
        if self._process is process:
            self._process = None
        ray.kill(process.actor)

    def _ending(self, process: _Process) -> str:
        if not process.ending:
            lines = process.log_file.read_text(errors="replace").splitlines() if process.log_file.is_file() else []
            error = last_error(lines)
            how = f"; the last error in its log: {error}" if error else ", without an error in its log"
            hint = "" if error else "; it may have been killed, for example as the memory ran out"
            process.ending = f"{self._name} has ended{how}{hint} (log: {process.log_file})"
        return process.ending
