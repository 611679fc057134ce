"""A task's own synchronous code, in a thread that holds up neither the event loop nor the end of the process."""

import asyncio
import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

THREAD_NAME = "slimrl-task-code"


class TaskCodeExited(Exception):
    """A task's own code raised what is no report of an error: it called sys.exit(), for example."""


def in_thread(call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """What `call` returns or raises, computed in a daemon thread of its own.

    What a future cannot hold, or what would end the event loop (SystemExit, KeyboardInterrupt, StopIteration, ...), is
    raised as TaskCodeExited, which names it.

    Unlike asyncio.to_thread, whose threads an event loop waits for without a deadline when it closes. Python cannot end
    the thread: a call that hangs goes on in the background when the future is cancelled.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def report(result: Any, error: Exception | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, which raises it
            report(None, reportable(error))
        else:
            report(result, None)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return future


def reportable(error: BaseException) -> Exception:
    """The error itself, or TaskCodeExited in place of what ends a process, a task or a generator."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    exited = TaskCodeExited(f"it raised {error!r}, which is no error that can be reported")
    exited.__cause__ = error
    return exited


def task_threads() -> list[threading.Thread]:
    """Those in which a call of `in_thread` still runs."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def end_process_if_calls_hang(exit_code: int) -> None:
    """End this process with the code where a call of `in_thread` still runs; else return. The last call of a program.

    The interpreter's own way to its end does not suit such a thread: one that wakes on that way is unwound, which
    aborts the process (exit code 134) where frames of Rust or C++ lie on its stack, as those of pydantic and torch do.
    What is registered with atexit and logging runs as ever.
    """
    if task_threads():
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
