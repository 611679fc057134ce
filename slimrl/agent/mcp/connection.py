"""One connection to an MCP server, through the official client.

The client's contexts must be left by the task that entered them. So a task of the connection's own stays within them
until the connection is closed or lost; calls come from other tasks of the same event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from mcp import ClientSession, McpError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, PaginatedRequestParams, Tool

from slimrl.agent.mcp.stderr_tail import StderrTail
from slimrl.agent.tools import ToolsUnavailable
from slimrl.base.loop_thread import END_S
from slimrl.config.schema.agent import McpServerConfig

SESSION_TERMINATED = 32600
"""The client's code for a server that does not know the session, as after its restart."""
CONNECT_TIMEOUT_S = 30.0
"""Deadline of an HTTP request; its answer is waited for as long as the call may take."""

log = logging.getLogger(__name__)


class ConnectionLost(ToolsUnavailable):
    """The server ended or cannot be reached.

    Args:
        taken: the server may have taken the call that met this.
    """

    def __init__(self, cause: str, *, taken: bool) -> None:
        super().__init__(cause)
        self.taken = taken


class Connection:
    """
    Args:
        name: of the server, for messages.
    """

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self._stderr = StderrTail()
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._session: ClientSession | None = None
        self._task = asyncio.create_task(self._serve())
        self.lost = False
        """Whether a call found the connection lost."""
        self.tools: list[Tool] = []
        """Tools that the server lists, once the connection is open"""

    async def open(self, timeout_s: float) -> None:
        """Wait until the server has listed its tools; to be closed also if it raises.

        Raises:
            ConnectionLost: there is no server, or it was too slow.
        """
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            raise self._loss("did not start")
        if not self._ready.is_set():
            raise self._loss(f"listed no tools within {timeout_s:g} s")

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """
        Raises:
            McpError: the server refused the call.
            ConnectionLost: the connection must be made anew.
        """
        assert self._session is not None
        if self._task.done():
            raise self._loss("ended")
        call = asyncio.create_task(self._session.call_tool(tool, arguments))
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._loss("ended", taken=True)
            return call.result()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise self._loss("ended") from error
        except McpError as error:
            if error.error.code not in (CONNECTION_CLOSED, SESSION_TERMINATED):
                raise
            raise self._loss("ended", taken=error.error.code == CONNECTION_CLOSED) from error
        finally:
            call.cancel()

    async def close(self, timeout_s: float) -> None:
        """Close the connection and end the server's process; after the deadline, by force."""
        self._closing.set()
        await asyncio.wait([self._task], timeout=timeout_s)
        self._task.cancel()
        ended = asyncio.gather(self._task, return_exceptions=True)
        await asyncio.wait([ended], timeout=END_S)
        if not self._task.done():
            log.warning("MCP server %s: its connection does not end within %g s and is left behind", self._name, END_S)

    def _loss(self, what: str, *, taken: bool = False) -> ConnectionLost:
        self.lost = True
        self._closing.set()
        error = None if not self._task.done() or self._task.cancelled() else self._task.exception()
        cause = what if error is None else f"{what}: {_cause(error)}"
        words = f". It wrote: {self._stderr.text}" if self._stderr.text else ""
        return ConnectionLost(f"MCP server {self._name} {cause}{words}", taken=taken)

    async def _serve(self) -> None:
        async with self._streams() as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            page = await session.list_tools()
            self.tools += page.tools
            while page.nextCursor:
                page = await session.list_tools(params=PaginatedRequestParams(cursor=page.nextCursor))
                self.tools += page.tools
            self._session = session
            self._ready.set()
            await self._closing.wait()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        config = self._config
        if config.url:
            timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)
            async with (
                httpx.AsyncClient(headers=config.headers, timeout=timeout) as client,
                streamable_http_client(config.url, http_client=client) as (read, write, _),
            ):
                yield read, write
        else:
            command, *args = config.command
            server = StdioServerParameters(command=command, args=args, env=config.env)
            async with self._stderr.file() as errlog, stdio_client(server, errlog) as (read, write):
                yield read, write


def _cause(error: BaseException) -> str:
    """What the first error of a group says."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    not_found = isinstance(error, McpError) and error.error.code == SESSION_TERMINATED
    return "the URL answers 404, not found" if not_found else str(error) or repr(error)
