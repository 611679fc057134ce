"""The process that holds an environment's class and forks a child for each connection.

It ends when its standard input does, and so with the process that started it, or when a process ends that all
instances share. It takes its children with it. A child whose client is gone may close its environment for as long as it
is given, and is killed then. What a child leaves behind, in its process group or as an orphan, is killed when the child
has ended.
"""

import ctypes
import math
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from slimrl.agent.isolation.child import serve
from slimrl.agent.isolation.supervisor import SET_DEATH_SIGNAL, SET_SUBREAPER, children_of_this, kill_children
from slimrl.agent.isolation.websocket import close_frame

BACKLOG = 4096
_POLL_S = 0.2
"""Longest time between looks at the deadlines of children that close"""


@dataclass(kw_only=True)
class _Child:
    pid: int
    handle: int
    """pidfd"""
    connection: socket.socket
    """A copy of the child's, which shows when the client is gone"""
    kill_at: float = math.inf
    """Time of the monotonic clock, once the client is gone"""


class ForkingServer:
    """
    Args:
        listening: the socket of the clients.
        make: makes an instance of the environment.
        close_s: seconds that a child may take to close its environment when its client is gone.
        shared: ids of the processes that all instances share, children of this process.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], Any], close_s: float, shared: Collection[int]
    ) -> None:
        self._listening, self._make, self._close_s, self._shared = listening, make, close_s, shared
        self._by_handle: dict[int, _Child] = {}
        self._by_connection: dict[int, _Child] = {}
        """Children whose client is there, by the file descriptor of the connection"""
        self._kept: set[int] = set()
        """Processes that were here before the first child, such as one that all instances share"""
        self._soft_limit = 0
        """This process's limit of open files at first"""
        self._poll = select.poll()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self) -> None:
        """Serve until the standard input or a shared process ends."""
        self._kept = set(children_of_this())
        self._libc.prctl(SET_SUBREAPER, 1)
        shared = [os.pidfd_open(pid) for pid in self._shared]
        # First, so that its events come first: a number that a child's end frees is in no event after it.
        self._poll.register(self._listening, select.POLLIN)
        for descriptor in (sys.stdin.fileno(), *shared):
            self._poll.register(descriptor, select.POLLIN)
        self._soft_limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each child takes two
        while True:
            for descriptor, _ in self._poll.poll(_POLL_S * 1000):
                if descriptor in shared:
                    print("a process that all instances share has ended, and so do they", file=sys.stderr, flush=True)
                if descriptor == sys.stdin.fileno() or descriptor in shared:
                    self._end_all()
                    return
                if descriptor == self._listening.fileno():
                    self._fork()
                elif descriptor in self._by_handle:
                    self._reap(self._by_handle[descriptor])
                elif descriptor in self._by_connection:
                    self._client_is_gone(self._by_connection[descriptor])
            self._kill_late()

    def _fork(self) -> None:
        server, pid = os.getpid(), 0
        with ExitStack() as unless_forked:
            try:
                connected, _ = self._listening.accept()
                unless_forked.callback(connected.close)
                pid = os.fork()
                if pid == 0:
                    self._be_child(connected, server)
                handle = os.pidfd_open(pid)
            except OSError as error:
                # The machine gives no more processes or files: this trajectory fails, the others go on.
                print(f"no process for another environment: {error}", file=sys.stderr, flush=True)
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                time.sleep(_POLL_S)
                return
            unless_forked.pop_all()
        with suppress(OSError):
            os.setpgid(pid, pid)  # as the child does; who is first does not matter
        child = _Child(pid=pid, handle=handle, connection=connected)
        self._by_handle[child.handle] = self._by_connection[connected.fileno()] = child
        self._poll.register(child.handle, select.POLLIN)
        self._poll.register(connected, select.POLLRDHUP)

    def _be_child(self, connected: socket.socket, server: int) -> None:
        code = 1
        try:
            self._libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
            self._libc.prctl(SET_SUBREAPER, 1)
            os.setpgid(0, 0)
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft_limit, most))
            self._listening.close()
            for other in self._by_handle.values():
                other.connection.close()
                os.close(other.handle)
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if os.getppid() == server:  # it may have ended before the death signal was set
                serve(connected, self._make)
            code = 0
        except ConnectionError:
            code = 0  # the client is gone
        except BaseException:  # noqa: BLE001 - a child never returns into the loop of its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _client_is_gone(self, child: _Child) -> None:
        self._forget_connection(child)
        child.kill_at = time.monotonic() + self._close_s

    def _forget_connection(self, child: _Child) -> None:
        if self._by_connection.pop(child.connection.fileno(), None) is not None:
            self._poll.unregister(child.connection)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in self._by_handle.values():
            if child.kill_at < now:
                child.kill_at = math.inf
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self, child: _Child) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        del self._by_handle[child.handle]
        self._poll.unregister(child.handle)
        os.close(child.handle)
        self._forget_connection(child)
        if status:
            code = os.waitstatus_to_exitcode(status)
            cause = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            with suppress(OSError):
                child.connection.setblocking(False)
                child.connection.send(close_frame(f"its process {child.pid} {cause}"))
        child.connection.close()
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill what ended children left behind: the kernel makes it this process's children."""
        kill_children(except_for={child.pid for child in self._by_handle.values()} | self._kept)

    def _end_all(self) -> None:
        for child in self._by_handle.values():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        self._by_handle.clear()
        self._end_orphans()
