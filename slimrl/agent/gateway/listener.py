"""Accepts the gateway's connections, never more than the process can spare file descriptors for.

1. At most half of the descriptors that this process may have are connections (RLIMIT_NOFILE), so that the run's own
   files, processes and engines always find one.
2. A connection is idle until a request with a key is under way on it. If there are as many connections as may be, the
   one that has been idle longest makes room for a new one; if all are busy, new ones wait in the kernel's queue.
   For a turn of the event loop MAX_CONNECTING more may be there, besides those that make room for them.
3. An idle connection, one whose request's headers are late included, ends after IDLE_S; aiohttp counts that.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Largest number of connections that wait to be accepted"""
IDLE_S = 30.0
"""Seconds after which a connection without a request, or whose headers are not complete, is closed"""
FULL_WAIT_S = 0.05
"""Seconds between two looks for a free place while every connection is busy"""
MAX_CONNECTING = 64
"""Largest number of connections that are accepted and not yet served: so many are accepted in one turn of the event
loop"""


class Listener:
    """
    Args:
        runner: whose server gets the connections; it is set up.
    """

    def __init__(self, runner: web.AppRunner) -> None:
        self._runner = runner
        self.max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._idle: dict[asyncio.Transport, None] = {}
        """Idle connections, in the order in which they became idle"""
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> tuple[str, int]:
        """Listen on a free port of a host, and give the address. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket))
        name, port = self._socket.getsockname()[:2]
        return name, port

    async def close(self) -> None:
        """Accept no more; the connections end with the runner."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting, *self._connecting])
        if self._socket is not None:
            self._socket.close()

    @asynccontextmanager
    async def also(self, listening: socket.socket) -> AsyncIterator[None]:
        """Accept from another socket too, such as one of another network namespace, which is closed at the end."""
        listening.setblocking(False)
        accepting = asyncio.create_task(self._accept(listening))
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
            listening.close()

    def check(self) -> None:
        """Raises what has ended the accepting of connections, if anything has."""
        if self._accepting is not None and self._accepting.done():
            self._accepting.result()

    @contextmanager
    def busy(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Keep a connection from making room while a request with a key is under way on it."""
        if transport is not None:
            self._idle.pop(transport, None)
        try:
            yield
        finally:
            if transport is not None and not transport.is_closing():
                self._idle[transport] = None

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        while True:
            while len(self._connecting) >= MAX_CONNECTING:
                await asyncio.sleep(0)
            while len(server.connections) + len(self._connecting) >= self.max_connections and not self._make_room():
                await asyncio.sleep(FULL_WAIT_S)
            try:
                connected, _ = await loop.sock_accept(listening)
            except OSError as error:
                # The process has no descriptors left, or the client is gone already.
                log.warning("the gateway cannot accept a connection: %s", error)
                await asyncio.sleep(1.0)
                continue
            # Beside this loop, since it takes further turns of the event loop.
            task = asyncio.create_task(self._connect(connected, server))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connected: socket.socket, server: web.Server) -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(server, connected)
        if len(self._idle) > 2 * len(server.connections) + 100:
            self._idle = {one: None for one in self._idle if not one.is_closing()}
        self._idle[transport] = None

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; False if there is none."""
        for transport in list(self._idle):
            del self._idle[transport]
            if not transport.is_closing():
                transport.abort()
                return True
        return False


def is_ours(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log: a traceback of each request that is no HTTP would be of use to no one."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
