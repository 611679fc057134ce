"""The process of an episode worker: `python -m slimrl.rollout.workers.worker SOCKET PARENT`.

1. It loads the code of the episodes from the driver's recipe, as the driver did before the start.
2. It runs each job as a coroutine on its event loop and sends the trajectory, not yet scored.
3. When the driver closes the connection it cancels what runs, which closes the environments, and ends. If the driver
   is killed, it is killed too.
"""

import asyncio
import logging
import pickle
import socket
import sys
import traceback
from contextlib import AsyncExitStack
from typing import Any

from slimrl.agent.episode import EpisodeRunner, failed_trajectory
from slimrl.agent.gateway.runner import GatewayRunner
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.lifeline import end_with
from slimrl.base.spans import SPANS
from slimrl.base.threads import end_process_if_calls_hang
from slimrl.config.load import LoadedRecipe
from slimrl.data.engine import Engine
from slimrl.data.trajectory import Trajectory
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.turn_logs import TurnLogs
from slimrl.rollout.garbage import rare_collections
from slimrl.rollout.loop_lag import LoopLag
from slimrl.rollout.task.episodes import load_episode_code
from slimrl.rollout.workers.messages import AskTurns, Cancel, Ended, Forget, Job, Messages, Ready, Setup, Turns, Use

log = logging.getLogger(__name__)


class Worker:
    """Runs the driver's jobs until the connection ends."""

    def __init__(self) -> None:
        self._messages = Messages(self._take, self._end)
        self._ended = asyncio.Event()
        self._runner: EpisodeRunner | GatewayRunner | None = None
        self._engine: Engine | None = None
        self._opened = AsyncExitStack()
        """Closes what was started, the last one first, each whatever becomes of the others"""
        self._starting: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lag = LoopLag()
        self._logs = TurnLogs()

    async def serve(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._messages, sock=connection)
        await self._ended.wait()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._lag.pause()
        if self._starting is not None:
            await self._starting
        await self._opened.aclose()

    def _take(self, message: Any) -> None:
        match message:
            case list():
                sys.path[:] = message
            case Setup():
                self._engine = message.engine
                self._starting = asyncio.create_task(self._start(message))
            case Job():
                if message.saved is not None:
                    self._logs.begin(message.trajectory_id, message.saved)
                self._running[message.trajectory_id] = asyncio.create_task(self._run(message))
                self._lag.resume()
            case Use(urls=urls, evaluating=evaluating):
                assert isinstance(self._engine, RoutedEngines)
                self._engine.use(urls, evaluating)
            case Cancel(trajectory_id=trajectory_id):
                if trajectory_id in self._running:
                    self._running[trajectory_id].cancel()
            case Forget(trajectory_id=trajectory_id):
                self._logs.forget(trajectory_id)
            case AskTurns():
                self._messages.send(Turns(logs=self._logs.snapshot()))

    async def _start(self, setup: Setup) -> None:
        """Load the runner and start it; the driver sends jobs when it is ready."""
        recipe, problem = setup.recipe, ""
        sandbox = SandboxPool(recipe.agent.sandbox)
        self._opened.push_async_callback(sandbox.close)
        self._opened.push_async_callback(setup.engine.aclose)
        try:
            loaded = LoadedRecipe(recipe=recipe, provenance={}, path="", command="rollout")
            logs = self._logs if recipe.rollout.spans_steps else None
            self._runner = load_episode_code(loaded, sandbox).episode_runner(recipe, setup.engine, logs)
            self._opened.push_async_callback(self._runner.stop)
            await self._runner.start()
        except Exception as error:
            # A task's own code may raise anything; the driver says it and ends the run.
            log.exception("cannot run episodes")
            problem = f"{type(error).__name__}: {error}"
        self._messages.send(Ready(problem=problem))

    async def _run(self, job: Job) -> None:
        assert self._runner is not None
        try:
            with SPANS.lane("episode"), SPANS("episode", id=job.trajectory_id):
                trajectory = await self._runner.run(
                    job.prompt, trajectory_id=job.trajectory_id, sampling=job.sampling, seed=job.seed
                )
            ended = Ended(
                trajectory_id=job.trajectory_id, trajectory=_pickled(trajectory, job), lags_s=self._lag.take()
            )
        except Exception:  # noqa: BLE001 - the driver raises it
            ended = Ended(trajectory_id=job.trajectory_id, fault=traceback.format_exc())
        finally:
            self._runner.engine.close(job.trajectory_id)
            del self._running[job.trajectory_id]
            if not self._running:
                self._lag.pause()
        self._messages.send(ended)

    def _end(self) -> None:
        self._ended.set()


def _pickled(trajectory: Trajectory, job: Job) -> bytes:
    """The trajectory, or a failed one in its place if its scratch cannot be sent."""
    try:
        return pickle.dumps(trajectory, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - what an object of the task's own raises is of any type
        cause = f"scratch cannot be sent to the driver, where rewards run with agent.workers above 1: {error}"
        log.warning("%s: %s", job.trajectory_id, cause)
        return pickle.dumps(failed_trajectory(job.prompt, job.trajectory_id, cause), pickle.HIGHEST_PROTOCOL)


def main() -> None:
    end_with(int(sys.argv[2]))
    SPANS.open_child()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))

    async def serve() -> None:
        await Worker().serve(connection)

    with rare_collections():
        asyncio.run(serve())
    end_process_if_calls_hang(0)


if __name__ == "__main__":
    main()
