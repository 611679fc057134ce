"""Whether processes live, their end and the wait for it.

A process that has ended stays in the table as a zombie until somebody takes its exit code. An orphan's is taken by the
first process of the machine or container, which may do it seconds later, or never.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_POLL_S = 0.01
END_S = 10.0
"""Seconds that a killed process may take to end."""


def lives(process: psutil.Process) -> bool:
    """Whether it holds anything: memory, files, sockets."""
    try:
        # The first of several threads may end before the others.
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def send_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def await_end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until these have ended; returns those that live after the deadline."""
    deadline, alive = time.monotonic() + timeout_s, list(processes)
    while (alive := [process for process in alive if lives(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return alive


async def ended(process: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has ended, without reaping it."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def end_group(process: "subprocess.Popen[bytes]") -> int | None:
    """Kill all that is left of the group that a process leads, and give its exit code, None if it lives on.

    It must not be reaped yet, so that no other group can have its number.
    """
    os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await ended(process)
    return process.poll()
