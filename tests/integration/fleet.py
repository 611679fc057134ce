"""Engines, owned by one process: for tests that need no Ray.

They start side by side; a failure of one ends the others.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType

from engine_probes import KEY

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.server import EngineServer


class Fleet:
    """A context manager that ends its engines."""

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
        """Start the engines' processes; `logs` is the folder for engine_<i>.log."""
        self.engines: list[EngineServer] = []
        for index in range(rollout.num_engines):
            log = logs / f"engine_{index}.log"
            self.engines.append(
                EngineServer(index, rollout, model, log, precision=precision, cuda=cuda, seed=seed + index, key=KEY)
            )

    @property
    def engine_urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def url(self) -> str:
        """Address of the first engine."""
        return self.engine_urls[0]

    def wait_ready(self) -> None:
        """Wait for all engines; ends everything and raises ServerError if one fails."""
        try:
            # After a failure `stop` ends the engines, and with them the other waits.
            _in_parallel([engine.wait_ready for engine in self.engines], wait=False)
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises ServerError with its log's cause for a process that has ended."""
        for engine in self.engines:
            engine.check()

    def stop(self) -> None:
        """End the engines; idempotent."""
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
