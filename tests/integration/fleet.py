"""Engines and the router before them, owned by one process: for tests that need no Ray.

Engines start side by side; a failure of one ends the others. Where each engine lives in an actor of its own, the
same EngineServer is used there and the Router by whoever knows the URLs.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.rollout.servers.router import Router
from slimrl.rollout.servers.server import EngineServer


class Fleet:
    """Engines and, by `rollout.router`, their router. A context manager that ends them."""

    def __init__(
        self,
        rollout: RolloutConfig,
        model: Path | str,
        logs: Path,
        *,
        precision: Precision,
        cuda: bool = False,
        seed: int = 0,
    ) -> None:
        """Start the engines' processes; `logs` is the folder for engine_<i>.log and router.log."""
        self._rollout = rollout
        self._logs = logs
        self.router: Router | None = None
        self.engines: list[EngineServer] = []
        for index in range(rollout.num_engines):
            log = logs / f"engine_{index}.log"
            self.engines.append(
                EngineServer(index, rollout, model, log, precision=precision, cuda=cuda, seed=seed + index)
            )

    @property
    def engine_urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def url(self) -> str:
        """Where generation requests go."""
        return self.router.url if self.router is not None else self.engine_urls[0]

    def wait_ready(self) -> None:
        """Wait for all engines, then start the router; ends everything and raises ServerError if one fails."""
        try:
            # After a failure `stop` ends the engines, and with them the other waits.
            _in_parallel([engine.wait_ready for engine in self.engines], wait=False)
            if self._rollout.router:
                self.router = Router(
                    self.engine_urls,
                    self._logs / "router.log",
                    timeout_s=self._rollout.startup_timeout_s,
                    request_timeout_s=self._rollout.request_timeout_s,
                )
                self.router.wait_ready()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises ServerError with its log's cause for a process that has ended."""
        for engine in self.engines:
            engine.check()
        if self.router is not None:
            self.router.check()

    def stop(self) -> None:
        """End the router and the engines; idempotent."""
        if self.router is not None:
            self.router.stop()
        _in_parallel([engine.stop for engine in self.engines])

    def __enter__(self) -> "Fleet":
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _in_parallel(calls: list[Callable[[], None]], *, wait: bool = True) -> None:
    """Run all; raise the first error, at once or (`wait`) when all have ended."""
    pool = ThreadPoolExecutor(max_workers=max(1, len(calls)))
    futures = [pool.submit(call) for call in calls]
    try:
        for future in as_completed(futures):
            future.result()
    finally:
        pool.shutdown(wait=wait)
