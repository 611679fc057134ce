"""A deadline for a task's own code, which may ignore that it is cancelled."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from slimrl.base.threads import reportable
from slimrl.base.waits import noting_waits

END_S = 1.0
"""How long a late call may take to end after it was cancelled, before it is left behind."""


async def within[T](call: Awaitable[T], timeout_s: float, problem: str) -> T:
    """What a call returns. One that is late is cancelled; one that does not end then is left behind.

    Args:
        timeout_s: without the time that the call waits for its turn, see `slimrl.base.waits`.
        problem: how the error of a late call begins, such as "no reward".

    Raises:
        TimeoutError: the call was late; names what it gives its CancelledError, as the part of it that is late.
        TaskCodeExited: it called sys.exit(), for example; and whatever it raises.
    """
    ends_at = time.monotonic() + timeout_s
    with noting_waits() as waits:
        running = asyncio.ensure_future(_own_task(call))
    try:
        while not running.done() and (left_s := waits.left_s(ends_at)) > 0:
            await asyncio.wait([running], timeout=left_s)
        done = running.done()
    finally:
        # Does nothing to a call that has ended.
        running.cancel()
        waits.over = True
    if done:
        return running.result()
    await asyncio.wait([running], timeout=END_S)
    raise TimeoutError(" from ".join([f"{problem} within {timeout_s:g} s", *_late_parts(running)]))


async def _own_task[T](call: Awaitable[T]) -> T:
    try:
        return await call
    except SystemExit as error:
        # A SystemExit in a task would end the event loop, and the run with it.
        raise reportable(error) from error


def _late_parts(running: "asyncio.Task[Any]") -> list[str]:
    try:
        running.result()
    except asyncio.CancelledError as error:
        return [str(part) for part in error.args]
    except Exception:  # noqa: BLE001 - it is late, whatever it does then
        return []
    return []
