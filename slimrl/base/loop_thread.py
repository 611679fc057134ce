"""An event loop in a thread of its own: connections and episodes go on while the driver trains."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any

WAIT_S = 0.2
"""Seconds between two looks at a result, so that signals reach the thread that waits for it."""
END_S = 10.0
"""Seconds that cancelled tasks have to end at the close."""


class LoopThread:
    """An event loop in a thread of its own: `run` and `close` are those of asyncio.Runner, but tasks go on between two
    calls of `run`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that one which nobody closed does not hold up the end of the process.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, or its exception; an exception of a signal handler in the calling thread cancels
        it."""
        future = self.submit(work)
        try:
            while not wait([future], timeout=WAIT_S).done:
                pass
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """Cancel what still runs, wait for its end for END_S, and end the thread."""
        self.run(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_S)
