"""How late an event loop is: code that does not await holds up every episode of its process."""

import asyncio
from collections.abc import Sequence

import numpy as np

PERIOD_S = 0.05
"""Seconds between two measurements."""


class LoopLag:
    """Measures the running event loop from `resume` to `pause`: how late a task that sleeps is woken."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    def resume(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    def pause(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def take(self) -> tuple[float, ...]:
        """Lags in seconds since the last call."""
        taken, self._lags_s = tuple(self._lags_s), []
        return taken

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._lags_s.append(max(0.0, loop.time() - due))


def loop_lag_metrics(lags_s: Sequence[float]) -> dict[str, float]:
    """Metrics of the event loops of the driver and of episode workers; empty if nothing was measured."""
    if not lags_s:
        return {}
    return {
        "time/loop_lag_p99_s": float(np.percentile(lags_s, 99)),
        "time/loop_lag_max_s": float(max(lags_s)),
    }
