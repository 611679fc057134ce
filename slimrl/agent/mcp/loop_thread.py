"""An event loop in a thread of its own.

Connections live on it: a rollout's loop stands still while the trainer works, and a start check has none.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, so that one which nobody closed does not hold up the end of the process.
        self._thread = threading.Thread(target=self._loop.run_forever, name="slimrl-mcp", daemon=True)
        self._thread.start()

    def submit[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what still runs, wait for its end, and end the thread."""
        self.submit(_end_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
