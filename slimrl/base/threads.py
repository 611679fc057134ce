"""Runs a task's synchronous code in a thread that blocks neither the event loop nor the end of the process."""

import asyncio
import atexit
import inspect
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

THREAD_NAME, IDLE_NAME = "slimrl-task-code", "slimrl-idle"
IDLE_S = 1.0


class TaskCodeExited(Exception):
    """A task's own code raised SystemExit or the like, for example with sys.exit()."""


def in_thread(call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Run `call` in its own daemon thread, with the caller's context variables; the future has its result or exception.

    Exceptions that would end the event loop or that a future cannot hold (SystemExit, KeyboardInterrupt,
    StopIteration, ...) are raised as TaskCodeExited, which names them.

    A closing event loop waits for the threads of asyncio.to_thread without a deadline, but not for these. Python cannot
    end the thread: after the future is cancelled, a call that hangs continues in the background.
    """
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    run = partial(copy_context().run, _run, call, future)
    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return future


async def call_task_code(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function of the task returns, or an object that can be called: an asynchronous one runs here, another in a
    thread of its own.

    Raises:
        TaskCodeExited: it called sys.exit(), for example; and whatever it raises.
    """
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(*arguments, **named)
        value = await in_thread(partial(function, *arguments, **named))
        # So does a lambda around an asynchronous function.
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise reportable(error) from error


class ReusedThreads:
    """Pool of threads as those of `in_thread`, each of which waits for another call after its own, since short calls
    take less time than the start of a thread. One without a call for IDLE_S ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        """Inboxes of the threads that wait for a call"""

    def run(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Run a call in a thread of the pool, as `in_thread` does."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=THREAD_NAME, daemon=True).start()
        inbox.put(partial(_run, call, future))
        return future

    def _serve(self, inbox: "queue.SimpleQueue[Callable[[], None]]") -> None:
        thread = threading.current_thread()
        while True:
            try:
                run = inbox.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                run = inbox.get()  # it came with the deadline
            thread.name = THREAD_NAME
            run()
            del run
            thread.name = IDLE_NAME
            with self._lock:
                self._idle.append(inbox)


class OwnThread:
    """One daemon thread that runs calls in the order in which they come, each as `in_thread` does."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=IDLE_NAME, daemon=True).start()

    def run(self, call: Callable[[], Any]) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(_run, call, future))
        return future

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._inbox.put(None)

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (run := self._inbox.get()) is not None:
            thread.name = THREAD_NAME
            run()
            del run
            thread.name = IDLE_NAME


def _run(call: Callable[[], Any], future: "asyncio.Future[Any]") -> None:
    """Give a future, from another thread than its loop's, what a call returns or raises."""

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    try:
        outcome = partial(future.set_result, call())
    except BaseException as error:  # noqa: BLE001 - handed to the waiting coroutine, which raises it
        outcome = partial(future.set_exception, reportable(error))
    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle, outcome)
    del outcome  # An error's traceback holds this frame, which would hold the error and all that its frames hold.


def reportable(error: BaseException) -> Exception:
    """The error itself, or TaskCodeExited for an exception that ends a process, a task or a generator."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    exited = TaskCodeExited(f"it raised {error!r}, which is not an ordinary exception")
    exited.__cause__ = error
    return exited


def task_threads() -> list[threading.Thread]:
    """The threads whose calls still run."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def end_process_if_calls_hang(exit_code: int) -> None:
    """Exit with this code if a call in a thread still runs, else return. A program calls it last.

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
