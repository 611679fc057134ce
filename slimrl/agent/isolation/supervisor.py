"""A small process above the one that serves environments: when that ends, in whatever way, it ends all that is left.

What is killed for want of memory is a large process, so it is not this one.
"""

import ctypes
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
"""Options of prctl(2)"""
END_S = 8.0
"""Seconds that the process may take to end when the input has ended"""
GRACE_S = 6.0
"""Seconds that what it leaves behind may take to end"""
_LOOK_S = 0.02


def supervised(socket: Path) -> None:
    """Fork: the child goes on, this process waits for its end and for that of the standard input, and ends.

    Args:
        socket: file that is removed at the end, with its folder, which the process that is killed cannot do.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_SUBREAPER, 1)
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != supervisor:  # it ended before the death signal was set
            os._exit(1)
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(handle, select.POLLIN)
    if handle not in dict(poll.poll()):
        poll.unregister(0)
        if not poll.poll(END_S * 1000):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _await_children(GRACE_S)
    kill_children(except_for=set())
    with suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _await_children(seconds: float) -> None:
    """Let processes that end by themselves do so, such as one that removes a browser's files."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(_LOOK_S)


def children_of_this() -> list[int]:
    return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def kill_children(*, except_for: set[int]) -> None:
    """Kill all children of this process, and what becomes its children thereby."""
    while others := set(children_of_this()) - except_for:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
