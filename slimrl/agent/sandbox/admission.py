"""Admission: a bounded number of runs at a time, a bounded queue in front of them, and a deadline for the wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slimrl.agent.sandbox.interface import SandboxBusy
from slimrl.base.waits import waiting


class Admission:
    """Places that are given in the order in which they were asked for. Used within one event loop.

    Args:
        max_running: places.
        max_waiting: how many may wait for one.
        wait_s: how long each may wait.
    """

    def __init__(self, *, max_running: int, max_waiting: int, wait_s: float) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting, self._wait_s = max_waiting, wait_s
        self.num_waiting = 0

    async def enter(self) -> None:
        """Take a place. Raises SandboxBusy if the queue is full, or the wait too long."""
        if self._places.locked() and self.num_waiting >= self._max_waiting:
            raise SandboxBusy(f"{self.num_waiting} runs wait already; raise max_waiting or max_running")
        self.num_waiting += 1
        try:
            with waiting():
                async with asyncio.timeout(self._wait_s):
                    await self._places.acquire()
        except TimeoutError:
            raise SandboxBusy(f"no place within {self._wait_s:g} s; raise wait_s or max_running") from None
        finally:
            self.num_waiting -= 1

    def leave(self) -> None:
        """Give the place back."""
        self._places.release()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        await self.enter()
        try:
            yield
        finally:
            self.leave()
