"""An MCP server with its connection, which is made anew after it was lost."""

import asyncio
import itertools
import logging
from concurrent.futures import Future
from typing import Any

from mcp import McpError
from mcp.types import Tool

from slimrl.agent.mcp.connection import Connection, ConnectionLost
from slimrl.agent.mcp.result_text import result_text
from slimrl.agent.tools import ToolError
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.agent import AgentConfig

log = logging.getLogger(__name__)


class McpServer:
    """
    Args:
        name: in `agent.mcp`.
        thread: its event loop has the connection.
    """

    def __init__(self, name: str, agent: AgentConfig, thread: LoopThread) -> None:
        self.name, self._config = name, agent.mcp[name]
        self._agent, self._thread = agent, thread
        self._connecting: asyncio.Task[Connection] | None = None
        """Task that gives the connection once it is open. All calls wait for one attempt, which none of them
        cancels."""

    def open(self) -> Future[list[Tool]]:
        """Connect; the future has the server's tools, or raises ConnectionLost."""
        return self._thread.submit(self._tools())

    def close(self) -> Future[None]:
        return self._thread.submit(self._close())

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The tool's answer. May be awaited on any event loop.

        A call that reached no server is made again after connecting anew, `restarts` times; so is one that the server
        may have taken, if the tool is pure.

        Raises:
            ToolError: the server refused the call, or answered that it failed.
            ConnectionLost: the server ended.
        """
        return await asyncio.wrap_future(self._thread.submit(self._call(tool, arguments)))

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        for attempt in itertools.count():
            try:
                connection = await self._connected()
                return result_text(await connection.call(tool, arguments))
            except McpError as error:
                raise ToolError(str(error)) from error
            except ConnectionLost as lost:
                repeatable = not lost.taken or tool in self._config.pure
                if attempt >= self._config.restarts or not repeatable:
                    raise
                log.warning("MCP server %s: %s; connecting anew", self.name, lost)
        raise AssertionError("unreachable")

    async def _tools(self) -> list[Tool]:
        return (await self._connected()).tools

    async def _connected(self) -> Connection:
        connecting = self._connecting
        if connecting is None or _is_of_no_use(connecting):
            connecting = self._connecting = asyncio.create_task(self._connect(connecting))
        return await asyncio.shield(connecting)

    async def _connect(self, former: asyncio.Task[Connection] | None) -> Connection:
        await self._end(former)
        connection = Connection(self.name, self._config)
        try:
            await connection.open(self._agent.start_timeout_s)
        except BaseException:
            await connection.close(0)
            raise
        return connection

    async def _close(self) -> None:
        connecting, self._connecting = self._connecting, None
        await self._end(connecting)

    async def _end(self, connecting: asyncio.Task[Connection] | None) -> None:
        if connecting is None:
            return
        if not connecting.done():
            connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled() and connecting.exception() is None:
            await connecting.result().close(self._agent.close_timeout_s)


def _is_of_no_use(connecting: asyncio.Task[Connection]) -> bool:
    """Whether an attempt failed, or its connection was lost since."""
    if not connecting.done():
        return False
    return connecting.cancelled() or connecting.exception() is not None or connecting.result().lost


def listed_tools(name: str, agent: AgentConfig) -> list[Tool]:
    """Start a server of `agent.mcp`, ask for its tools, and end it.

    Raises:
        ConnectionLost: it does not start.
    """
    thread = LoopThread("slimrl-mcp")
    server = McpServer(name, agent, thread)
    try:
        return server.open().result()
    finally:
        server.close().result()
        thread.close()
