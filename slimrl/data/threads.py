"""A task's own synchronous code, in a thread that holds up neither the event loop nor the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any


def in_thread(call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """What `call` returns or raises, computed in a daemon thread of its own.

    Unlike asyncio.to_thread, whose threads an event loop waits for without a deadline when it closes. Python cannot end
    the thread: a call that hangs goes on in the background when the future is cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def report(result: Any, error: BaseException | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - handed to the waiting coroutine, which raises it
            report(None, error)
        else:
            report(result, None)

    threading.Thread(target=run, name="slimrl-task-code", daemon=True).start()
    return future
