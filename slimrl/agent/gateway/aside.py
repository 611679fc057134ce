"""Long computations in threads, so that they do not hold up the event loop, which serves all trajectories."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from slimrl.base.threads import ReusedThreads

SHORT = 16_384
"""Largest size (bytes, characters or tokens) of what is computed on the event loop itself: it takes a few milliseconds,
less than its way to a thread and back would disturb"""
MAX_THREADS = 8


class Aside:
    """Calls a function where it holds up no one: in a thread, unless what it works on is short.

    A thread cannot be ended, so that callers bound what they bring. In Python's own code the threads and the loop take
    turns of 5 ms; a tokenizer lets go of the interpreter.
    """

    def __init__(self) -> None:
        self._threads = ReusedThreads()
        self._places = asyncio.Semaphore(min(MAX_THREADS, len(os.sched_getaffinity(0))))

    async def run[T](self, call: Callable[[], T], size: int, turn: asyncio.Lock) -> T:
        """What the call returns or raises.

        Args:
            size: of what it works on, as SHORT.
            turn: held until the call has ended, also where its caller is cancelled meanwhile.
        """
        await turn.acquire()
        running: asyncio.Future[Any] | None = None
        try:
            if size <= SHORT:
                return call()
            await self._places.acquire()
            running = self._threads.run(call)
        finally:
            if running is None:
                turn.release()
        running.add_done_callback(partial(self._ended, turn))
        result: Any = await asyncio.shield(running)
        return result

    def _ended(self, turn: asyncio.Lock, running: "asyncio.Future[Any]") -> None:
        self._places.release()
        turn.release()
        if not running.cancelled():
            running.exception()  # the caller may be gone
