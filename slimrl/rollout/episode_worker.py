"""An episode worker: it runs episodes of the driver in a process of its own, each as a coroutine on its event loop.

The driver's side of it is runtime/cluster/episode_workers.py. One call brings all messages that the driver has, another
one takes all episodes that have ended, since a call for each costs more than many a short episode. Trajectories go back
not yet scored.
"""

import asyncio
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slimrl.agent.episode_end import failed_trajectory
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.errors import StageError
from slimrl.base.spans import PROFILE_FOLDER, SPANS
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import Engine
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.turn_logs import LoggedTurn, TurnLogs
from slimrl.observability.logs import capture_output
from slimrl.rollout.garbage import rare_collections
from slimrl.rollout.loop_lag import LoopLag
from slimrl.rollout.task.episodes import load_episode_code

MOST_BYTES = 64 * 2**20
"""Size of trajectories beyond which one answer takes no more of them: Ray's object store, which holds it, is small."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """An episode to run."""

    trajectory_id: str
    prompt: Prompt
    sampling: SamplingConfig
    seed: int | None
    saved: Sequence[LoggedTurn] | None = None
    """Turns of the trajectory in an earlier run; None if its turns are not to be logged"""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    trajectory_id: str


@dataclass(frozen=True, kw_only=True)
class Forget:
    """The worker may drop the log of a trajectory."""

    trajectory_id: str


@dataclass(frozen=True, kw_only=True)
class Use:
    """The engines that may serve from now on; see RoutedEngines."""

    urls: tuple[str, ...]
    evaluating: tuple[str, ...] | None


Message = Job | Cancel | Forget | Use


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of an episode."""

    trajectory_id: str
    trajectory: bytes = b""
    """Pickled trajectory, since it may hold a task's own objects, which the driver may fail to read"""
    fault: str = ""
    """Traceback of an exception that is neither the engine's nor the task's; there is then no trajectory."""
    lags_s: tuple[float, ...] = ()
    """Lags of the worker's event loop since the last episode that ended; see LoopLag"""


class EpisodeWorker:
    """Runs the driver's jobs. `start` comes first. All methods are called on one event loop."""

    def __init__(self, name: str, log_file: Path, working_directory: Path, paths: Sequence[str]) -> None:
        """
        Args:
            log_file: gets all output of this process.
            working_directory: the driver's.
            paths: the driver's `sys.path`.
        """
        capture_output(log_file)
        os.chdir(working_directory)
        sys.path[:] = paths
        SPANS.open(log_file.parent.parent / PROFILE_FOLDER, name)
        self._opened = AsyncExitStack()
        """Closes what was started, the last one first, each whatever becomes of the others"""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended: list[Ended] = []
        self._has_ended = asyncio.Event()
        self._lag, self._logs = LoopLag(), TurnLogs()

    async def start(
        self, loaded: LoadedRecipe, engine: Engine, variables: Mapping[str, str], past: Engine | None = None
    ) -> int:
        """Load the code of the episodes, as the driver did before the start; returns the process's id.

        Args:
            engine: client of the engines that has not connected yet.
            past: client of the engines of older versions of the policy, likewise.
            variables: of the driver's environment. They may be secrets, and Ray keeps what a constructor is given.

        Raises:
            StageError: the worker cannot run episodes.
        """
        os.environ.update(variables)
        self._engine = engine
        recipe = loaded.recipe
        sandbox = SandboxPool(recipe.agent.sandbox)
        self._opened.push_async_callback(sandbox.close)
        for client in (engine, past):
            if client is not None:
                self._opened.push_async_callback(client.aclose)
        logs = self._logs if recipe.rollout.spans_steps else None
        try:
            self._runner = load_episode_code(loaded, sandbox).episode_runner(recipe, engine, logs, past)
            self._opened.push_async_callback(self._runner.stop)
            await self._runner.start()
        except Exception as error:
            # A task's own code may raise anything, also what cannot be sent.
            log.exception("cannot run episodes")
            raise StageError(f"{type(error).__name__}: {error}") from error
        self._opened.enter_context(rare_collections())
        return os.getpid()

    async def take(self, messages: bytes) -> None:
        """
        Args:
            messages: pickled list of messages, those of earlier calls before them.
        """
        for message in pickle.loads(messages):
            match message:
                case Job(trajectory_id=trajectory_id, saved=saved):
                    if saved is not None:
                        self._logs.begin(trajectory_id, saved)
                    task = self._running[trajectory_id] = asyncio.create_task(self._run(message))
                    # Also of a task that is cancelled before it has begun.
                    task.add_done_callback(partial(self._note_end, trajectory_id))
                    self._lag.resume()
                case Cancel(trajectory_id=trajectory_id):
                    if trajectory_id in self._running:
                        self._running[trajectory_id].cancel()
                case Forget(trajectory_id=trajectory_id):
                    self._logs.forget(trajectory_id)
                case Use(urls=urls, evaluating=evaluating):
                    assert isinstance(self._engine, RoutedEngines)
                    self._engine.use(urls, evaluating)

    async def ended(self) -> bytes:
        """The episodes that have ended since the last call, once there is one: a pickled list of Ended."""
        await self._has_ended.wait()
        given, size = 0, 0
        while given < len(self._ended) and size < MOST_BYTES:
            size += len(self._ended[given].trajectory)
            given += 1
        taken, self._ended = self._ended[:given], self._ended[given:]
        if not self._ended:
            self._has_ended.clear()
        return pickle.dumps(taken, pickle.HIGHEST_PROTOCOL)

    async def turns(self) -> dict[str, list[LoggedTurn]]:
        """The logs of the trajectories' turns as they are now."""
        return self._logs.snapshot()

    async def close(self) -> None:
        """Cancel what runs, which closes the environments, and close what was started."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._opened.aclose()

    async def _run(self, job: Job) -> None:
        name = job.trajectory_id
        try:
            with SPANS.lane("episode"), SPANS("episode", id=name):
                trajectory = await self._runner.run(
                    job.prompt, trajectory_id=name, sampling=job.sampling, seed=job.seed
                )
            ended = Ended(trajectory_id=name, trajectory=_pickled(trajectory, job), lags_s=self._lag.take())
        except (Exception, SystemExit):  # noqa: BLE001 - the driver raises it
            ended = Ended(trajectory_id=name, fault=traceback.format_exc())
        finally:
            self._runner.engine.close(name)
        self._ended.append(ended)
        self._has_ended.set()

    def _note_end(self, trajectory_id: str, _: asyncio.Task[None]) -> None:
        del self._running[trajectory_id]
        if not self._running:
            self._lag.pause()


def _pickled(trajectory: Trajectory, job: Job) -> bytes:
    """The trajectory, or a failed one in its place if its scratch cannot be sent."""
    try:
        return pickle.dumps(trajectory, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - what an object of the task's own raises is of any type
        cause = f"scratch cannot be sent to the driver, where rewards run with agent.workers above 1: {error}"
        log.warning("%s: %s", job.trajectory_id, cause)
        return pickle.dumps(failed_trajectory(job.prompt, job.trajectory_id, cause), pickle.HIGHEST_PROTOCOL)
