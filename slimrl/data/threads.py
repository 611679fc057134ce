"""Runs a task's synchronous code in a thread that blocks neither the event loop nor the end of the process."""

import asyncio
import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

THREAD_NAME = "slimrl-task-code"


class TaskCodeExited(Exception):
    """A task's own code raised SystemExit or the like, for example with sys.exit()."""


def in_thread(call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run `call` in its own daemon thread; the future has its result or exception.

    Exceptions that would end the event loop or that a future cannot hold (SystemExit, KeyboardInterrupt,
    StopIteration, ...) are raised as TaskCodeExited, which names them.

    A closing event loop waits for the threads of asyncio.to_thread without a deadline, but not for these. Python cannot
    end the thread: after the future is cancelled, a call that hangs continues in the background.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, call())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, which raises it
            outcome = partial(future.set_exception, reportable(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)
        del outcome  # An error's traceback holds this frame, which would hold the error and all that its frames hold.

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return future


def reportable(error: BaseException) -> Exception:
    """The error itself, or TaskCodeExited for an exception that ends a process, a task or a generator."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    exited = TaskCodeExited(f"it raised {error!r}, which is not an ordinary exception")
    exited.__cause__ = error
    return exited


def task_threads() -> list[threading.Thread]:
    """The threads of `in_thread` that still run."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def end_process_if_calls_hang(exit_code: int) -> None:
    """Exit with this code if a call of `in_thread` still runs, else return. A program calls it last.

    At its normal exit the interpreter unwinds a thread that wakes up, which aborts the process (exit code 134) if Rust
    or C++ frames are on the thread's stack, such as those of pydantic and torch. This exit skips that, but runs the
    atexit functions and flushes the logs.
    """
    if task_threads():
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
