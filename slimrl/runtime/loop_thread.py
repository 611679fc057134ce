"""An event loop on a thread of its own: episodes go on while the driver trains."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any

WAIT_S = 0.2
"""Between two looks at a result, so that signals reach the thread that waits for it."""
END_S = 10.0
"""For cancelled tasks to end at the close."""


class LoopThread:
    """`run` and `close` are those of asyncio.Runner, but tasks go on between two calls of `run`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout service", daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, or its exception; a signal's exception in the calling thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], timeout=WAIT_S).done:
                pass
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=END_S)
