"""The tools of MCP servers, together with tools that are functions.

1. Before a run every server was started, asked for its tools, and ended.
2. `open` connects the servers that all episodes share, `close` ends them.
3. A server with `per_trajectory` is connected as an episode begins, and ends with it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from mcp.types import Tool as McpTool

from slimrl.agent.mcp.server import McpServer
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import Tool, ToolBox, ToolOptions
from slimrl.base.loop_thread import LoopThread
from slimrl.config.schema.agent import AgentConfig


class McpToolBox(ToolBox):
    """
    Args:
        functions: tools that are functions.
        listed: the tools of each server of `agent.mcp`, by its name.

    Raises:
        ValueError: two tools have one name, also after servers' names were put before those that several have.
    """

    def __init__(
        self,
        functions: Sequence[Tool],
        listed: Mapping[str, Sequence[McpTool]],
        agent: AgentConfig,
        sandbox: SandboxPool | None = None,
    ) -> None:
        self._agent = agent
        self._thread: LoopThread | None = None
        self._servers: dict[str, McpServer] = {}
        """Open servers, by name"""
        self._own: list[McpServer] = []
        """Servers that belong to this episode alone"""
        counts = Counter(tool.name for tool in functions)
        counts.update(tool.name for theirs in listed.values() for tool in theirs)
        self._places: dict[str, tuple[str, str]] = {}
        """Server of each tool and its name there, by its name here"""
        tools = list(functions)
        for server, theirs in listed.items():
            for tool in theirs:
                name = tool.name if counts[tool.name] == 1 else f"{server}_{tool.name}"
                self._places[name] = (server, tool.name)
                pure = tool.name in agent.mcp[server].pure
                tools.append(
                    Tool(
                        name=name,
                        function=self._function(name),
                        schema=_schema(name, tool),
                        options=ToolOptions(pure=pure),
                    )
                )
        super().__init__(tools, sandbox)

    def open(self) -> None:
        self._thread = LoopThread("slimrl-mcp")
        self._servers = {
            name: self._made(name) for name, config in self._agent.mcp.items() if not config.per_trajectory
        }
        try:
            for opening in [server.open() for server in self._servers.values()]:
                opening.result()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._thread is None:
            return
        for closing in [server.close() for server in self._servers.values()]:
            closing.result()
        self._thread.close()
        self._thread = None

    async def for_episode(self) -> ToolBox:
        own = [self._made(name) for name, config in self._agent.mcp.items() if config.per_trajectory]
        if not own:
            return self
        episode = copy(self)
        episode._own, episode._servers = own, self._servers | {server.name: server for server in own}
        episode._tools = {
            name: replace(tool, function=episode._function(name)) if name in self._places else tool
            for name, tool in self._tools.items()
        }
        try:
            await asyncio.gather(*(asyncio.wrap_future(server.open()) for server in own))
        except BaseException:
            await episode.end_episode()
            raise
        return episode

    async def end_episode(self) -> None:
        await asyncio.gather(*(asyncio.wrap_future(server.close()) for server in self._own))

    def _made(self, name: str) -> McpServer:
        assert self._thread is not None, "open comes first"
        return McpServer(name, self._agent, self._thread)

    def _function(self, name: str) -> Callable[..., Coroutine[Any, Any, str]]:
        async def call(**arguments: Any) -> str:
            server, tool = self._places[name]
            return await self._servers[server].call(tool, arguments)

        return call


def _schema(name: str, tool: McpTool) -> dict[str, Any]:
    """A tool's schema as chat templates take it, with the server's own words."""
    parameters = {"type": "object", "properties": {}, **tool.inputSchema}
    return {
        "type": "function",
        "function": {"name": name, "description": tool.description or "", "parameters": parameters},
    }
