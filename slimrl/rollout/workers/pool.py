"""Episode workers from the driver's side: processes that run the episodes (`agent.workers`).

1. An episode goes to the worker with the fewest. Its trajectory comes back when it has ended; rewards, those of groups
   and the teacher's scores follow in the driver, so that their connections and caches exist once.
2. A worker that ends takes its episodes with it: they fail with its cause, which counts for
   `rollout.max_failed_fraction`. The next episode that it gets starts it again.
3. One whose event loop is blocked beyond all deadlines of an episode is ended.
4. A worker logs the turns of its episodes (engines/turn_logs.py) until the driver has no need of them.
"""

import asyncio
import logging
import os
import pickle
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.agent.episode import failed_trajectory
from slimrl.base.errors import StageError
from slimrl.base.spans import PROFILE_FOLDER, child_variables
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.servers.process import ServerError, ServerProcess
from slimrl.engines.turn_logs import LoggedTurn
from slimrl.rollout.workers.messages import AskTurns, Cancel, Ended, Forget, Job, Messages, Ready, Setup, Turns, Use

GRACE_S = 30.0
"""Seconds beyond the deadlines of an episode until its worker is killed; also those that a worker has to end by
itself."""
POLL_S = 0.05
TURNS_S = 10.0
"""Deadline for a worker to send the logs of its episodes' turns"""

log = logging.getLogger(__name__)


class WorkerEnded(Exception):
    """A worker ended while it ran an episode; the message has the cause."""


class WorkerFault(Exception):
    """An exception in a worker that is neither the engine's nor the task's; the message is its traceback."""


class EpisodeWorkers:
    """All workers of a run. `run` is that of EpisodeRunner."""

    def __init__(self, recipe: Recipe, engine: Engine, logs: Path) -> None:
        """
        Args:
            engine: client of the engines, not connected yet; each worker gets a copy, and is told which may serve.
            logs: folder for the workers' output.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        if isinstance(engine, RoutedEngines):
            engine.follow(self._tell_engines)
        setup = Setup(recipe=recipe, engine=engine)
        self._workers = [EpisodeWorker(index, setup, logs) for index in range(recipe.agent.workers)]
        self._saved: dict[str, Sequence[LoggedTurn]] = {}
        """Turns of an earlier run, by trajectory, for the trajectories to log"""

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.pid is not None]

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
        """
        worker = min(self._workers, key=lambda each: each.num_jobs)
        saved = self._saved.get(trajectory_id)
        job = Job(trajectory_id=trajectory_id, prompt=prompt, sampling=sampling, seed=seed, saved=saved)
        try:
            return pickle.loads(await worker.run(job))
        except WorkerEnded as error:
            cause = str(error)
        except (StageError, WorkerFault):
            raise
        except Exception as error:  # noqa: BLE001 - what an object of the task's own raises is of any type
            cause = f"scratch cannot be read in the driver, where rewards run with agent.workers above 1: {error!r}"
        log.warning("%s: %s", trajectory_id, cause)
        return failed_trajectory(prompt, trajectory_id, cause)

    def begin(self, trajectory_id: str, saved: Sequence[LoggedTurn] = ()) -> None:
        """Log the turns of a trajectory from now on; call it before `run`. See TurnLogs."""
        self._saved[trajectory_id] = saved

    def forget(self, trajectory_id: str) -> None:
        """Drop the log of a trajectory; see TurnLogs."""
        if self._saved.pop(trajectory_id, None) is not None:
            for worker in self._workers:
                worker.forget(trajectory_id)

    async def turns(self) -> dict[str, Sequence[LoggedTurn]]:
        """The turns of all logged trajectories, by trajectory; see RolloutStage.turns."""
        logs = dict(self._saved)
        for of_worker in await asyncio.gather(*(worker.turns() for worker in self._workers)):
            logs |= of_worker
        return logs

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


class EpisodeWorker:
    """One worker: its process, once it is needed, and the connection to it."""

    def __init__(self, index: int, setup: Setup, logs: Path) -> None:
        self._name, self._setup, self._logs = f"episode worker {index}", setup, logs
        self._log_stem = f"episodes_{index}"
        agent, rollout = setup.recipe.agent, setup.recipe.rollout
        starts_s = (1 + agent.start_retries) * (agent.start_timeout_s + agent.close_timeout_s)
        self._deadline_s = starts_s + rollout.trajectory_timeout_s + agent.close_timeout_s + GRACE_S
        self._process: ServerProcess | None = None
        self._num_starts = 0
        self._messages: Messages | None = None
        """The connection to the process, until it ends"""
        self._is_ready = False
        self._starting = asyncio.Lock()
        self._ready: asyncio.Future[Ready] | None = None
        self._jobs: dict[str, asyncio.Future[Ended]] = {}
        self._turns: asyncio.Future[Turns] | None = None
        """Pending answer to a request for the logs of turns"""
        self._lags_s: list[float] = []
        self.num_jobs = 0
        """Number of the worker's episodes, those that wait for its start included"""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def take_lags(self) -> list[float]:
        taken, self._lags_s = self._lags_s, []
        return taken

    def tell_engines(self) -> None:
        """Tell the worker which engines may serve now; one that is not ready will be told when it is."""
        engine = self._setup.engine
        if self._is_ready and self._messages is not None and isinstance(engine, RoutedEngines):
            urls, evaluating = engine.in_use
            self._messages.send(Use(urls=urls, evaluating=evaluating))

    async def ready(self) -> None:
        """Start the process if none is connected.

        Raises:
            StageError: it ended, found a problem, or was not ready before `rollout.startup_timeout_s`.
        """
        async with self._starting:
            if self._is_ready:
                return
            self._end_process()
            self._ready = asyncio.get_running_loop().create_future()
            try:
                messages = await self._connected()
            except OSError as error:
                raise StageError(f"{self._name} cannot be started: {error}") from error
            messages.send(sys.path)
            messages.send(self._setup)
            timeout_s = self._setup.recipe.rollout.startup_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._ready
            except TimeoutError as error:
                raise StageError(f"{self._name} was not ready within {timeout_s:g} s") from error
            except WorkerEnded as error:
                raise StageError(str(error)) from error
            if answer.problem:
                raise StageError(f"{self._name}: {answer.problem}")
            self.tell_engines()

    async def run(self, job: Job) -> bytes:
        """The pickled trajectory of an episode.

        Raises:
            StageError: the worker does not start.
            WorkerEnded: it ended before the episode.
            WorkerFault: it failed by a fault of ours.
        """
        self.num_jobs += 1
        try:
            await self.ready()
            outcome = await self._outcome(job)
        finally:
            self.num_jobs -= 1
        if outcome.fault:
            raise WorkerFault(f"{self._name}: {outcome.fault}")
        return outcome.trajectory

    async def _outcome(self, job: Job) -> Ended:
        messages = self._messages
        if messages is None:
            raise WorkerEnded(self._ending())
        self._jobs[job.trajectory_id] = ended = asyncio.get_running_loop().create_future()
        messages.send(job)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await ended
        except TimeoutError:
            late = f"it did not answer within {self._deadline_s:g} s, so code that does not await blocks it"
            cause = f"{self._name} was ended: {late}"
            if messages is self._messages:
                self._fail_all(cause)
                self._end_process()
            raise WorkerEnded(cause) from None
        except asyncio.CancelledError:
            messages.send(Cancel(trajectory_id=job.trajectory_id))
            raise
        finally:
            del self._jobs[job.trajectory_id]

    def forget(self, trajectory_id: str) -> None:
        if self._messages is not None:
            self._messages.send(Forget(trajectory_id=trajectory_id))

    async def turns(self) -> dict[str, list[LoggedTurn]]:
        """The logs of its trajectories; none if it has ended or does not answer."""
        if self._messages is None or not self._is_ready:
            return {}
        self._turns = asyncio.get_running_loop().create_future()
        self._messages.send(AskTurns())
        try:
            async with asyncio.timeout(TURNS_S):
                return (await self._turns).logs
        except (TimeoutError, WorkerEnded) as error:
            log.warning("%s: a run that continues from here samples its episodes again: %r", self._name, error)
            return {}
        finally:
            self._turns = None

    async def close(self) -> None:
        """End the process: by itself, or by a signal once the deadline of the environments' close is over."""
        if self._process is not None and self._messages is not None and self._is_ready:
            self._messages.close()
            deadline_s = self._setup.recipe.agent.close_timeout_s + GRACE_S
            try:
                async with asyncio.timeout(deadline_s):
                    await _end_of(self._process)
            except TimeoutError:
                log.warning("%s did not end within %g s", self._name, deadline_s)
        self._end_process()

    def _end_process(self) -> None:
        """Kill the process, if there is one; what its connection has yet to say concerns no other."""
        process = self._process
        self._process = self._messages = None
        self._is_ready = False
        if process is not None:
            process.stop()

    async def _connected(self) -> Messages:
        """A new process and the connection to it."""
        ours, theirs = socket.socketpair()
        suffix = f"_{self._num_starts}" if self._num_starts else ""
        self._num_starts += 1
        with theirs:
            module = "slimrl.rollout.workers.worker"
            command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
            log_file = self._logs / f"{self._log_stem}{suffix}.log"
            variables = child_variables(self._logs.parent / PROFILE_FOLDER, self._name)
            self._process = ServerProcess(self._name, command, variables, log_file, pass_fds=(theirs.fileno(),))
        log.info("process %d: %s", self._process.pid, self._name)
        messages: Messages = Messages(self._take, lambda: self._lost(messages))
        self._messages = messages
        await asyncio.get_running_loop().create_connection(lambda: messages, sock=ours)
        return messages

    def _take(self, message: Any) -> None:
        match message:
            case Ready() if self._ready is not None and not self._ready.done():
                self._is_ready = not message.problem
                self._ready.set_result(message)
            case Ended(trajectory_id=trajectory_id):
                self._lags_s += message.lags_s
                if (waiting := self._jobs.get(trajectory_id)) is not None and not waiting.done():
                    waiting.set_result(message)
            case Turns() if self._turns is not None and not self._turns.done():
                self._turns.set_result(message)

    def _lost(self, messages: Messages) -> None:
        if messages is not self._messages:
            return  # that of a process before
        self._messages, self._is_ready = None, False
        if self._jobs or self._turns is not None or (self._ready is not None and not self._ready.done()):
            self._fail_all(self._ending())

    def _fail_all(self, cause: str) -> None:
        """Fail all that waits for the worker, which has ended."""
        for future in (self._ready, self._turns, *self._jobs.values()):
            if future is not None and not future.done():
                future.set_exception(WorkerEnded(cause))

    def _ending(self) -> str:
        if self._process is None:
            return f"{self._name} was closed"
        try:
            # Its socket closes a moment before it has ended.
            self._process.ended_within(1.0)
            self._process.check()
        except ServerError as error:
            return str(error)
        return f"{self._name} closed its connection"


async def _end_of(process: ServerProcess) -> None:
    while not process.ended_within(0):
        await asyncio.sleep(POLL_S)
