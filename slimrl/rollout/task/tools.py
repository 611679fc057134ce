"""The tools of a recipe: functions, sub-agents, and those that its MCP servers list."""

from functools import partial
from itertools import chain
from typing import Any

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.subagents import subagent_tool
from slimrl.agent.tools import Tool, ToolBox, ToolsUnavailable, check_arguments, tools_of
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.problems import suggestion
from slimrl.config.schema.agent import AgentConfig


def load_tools(agent: AgentConfig, collector: ProblemCollector, sandbox: SandboxPool) -> ToolBox | None:
    """Resolve the functions, and start each server once to ask for its tools. None if something is wrong."""
    functions = collector.get("agent.tools", partial(_functions, agent))
    if not agent.mcp:
        return None if functions is None else collector.get("agent.tools", lambda: ToolBox(functions, sandbox))
    # Not at the top: its package is an extra.
    from slimrl.agent.mcp.tool_box import McpToolBox

    listed = {name: collector.get(f"agent.mcp.{name}", partial(_listed, name, agent)) for name in agent.mcp}
    complete = {name: tools for name, tools in listed.items() if tools is not None}
    if functions is None or len(complete) < len(listed):
        return None
    return collector.get("agent.mcp", lambda: McpToolBox(functions, complete, agent, sandbox))


def _functions(agent: AgentConfig) -> list[Tool]:
    """Functions and sub-agents; raises ValueError for a path that leads to no tool, and for arguments of none."""
    functions = tools_of(agent.tools, agent.tool_args)
    theirs = [tools_of(settings.tools, agent.tool_args) for settings in agent.subagents.values()]
    check_arguments([*functions, *chain(*theirs)], agent.tool_args)
    return [*functions, *(subagent_tool(name, settings) for name, settings in agent.subagents.items())]


def _listed(name: str, agent: AgentConfig) -> list[Any]:
    """Raises ValueError: the server does not start, has no tools, or lacks one that the recipe names."""
    from slimrl.agent.mcp.server import listed_tools

    config = agent.mcp[name]
    try:
        tools = {tool.name: tool for tool in listed_tools(name, agent)}
    except ToolsUnavailable as error:
        raise ValueError(str(error)) from error
    if not tools:
        raise ValueError("the server lists no tools")
    for wanted in [*config.tools, *config.pure]:
        if wanted not in tools:
            raise ValueError(f"the server has no tool {wanted}.{suggestion(wanted, tools)} It has {', '.join(tools)}")
    return [tools[wanted] for wanted in config.tools] or list(tools.values())
