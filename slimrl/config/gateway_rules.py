"""Rules of agents behind the gateway: `agent.command` and `agent.function`."""

import ipaddress
import os
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

from slimrl.config.problems import Violation
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe

EXCLUDED = (
    "tools", "tool_args", "mcp", "subagents", "max_tool_calls", "environment", "environment_args", "episode",
)  # fmt: skip


def command_words(command: Any) -> list[str]:
    """The words of `agent.command`.

    Raises:
        ValueError: it is neither a list of words nor a text with whole quotes.
    """
    if isinstance(command, list) and all(isinstance(word, str) for word in command):
        return command
    if not isinstance(command, str):
        raise ValueError(f"{command!r} is no command. Write a list of words, or a text.")
    return shlex.split(command)


def gateway_violations(agent: AgentConfig) -> Iterator[Violation]:
    """Agents that are given twice or together with what they replace, and commands that are none.

    Args:
        agent: with an agent behind the gateway.
    """
    key = "agent.command" if agent.command else "agent.function"
    if agent.command and agent.function:
        yield "agent.function", "agent.command has the agent too. Give one of the two."
    for name in EXCLUDED:
        if getattr(agent, name):
            yield f"agent.{name}", f"the agent of {key} has tools and a loop of its own. Leave it out."
    if agent.compaction.at_tokens is not None:
        yield "agent.compaction.at_tokens", f"the agent of {key} keeps its own contexts. Leave it out."
    if agent.workers > 1:
        yield (
            "agent.workers",
            f"{agent.workers}: one process serves all agents, which are processes themselves. Use 1.",
        )
    if agent.command:
        try:
            words = command_words(agent.command)
        except ValueError as error:
            yield "agent.command", str(error)
        else:
            if not words or not words[0].strip():
                yield "agent.command", f"{agent.command!r} names no program."
    elif agent.command_env or agent.command_sandbox.enabled:
        key = "agent.command_env" if agent.command_env else "agent.command_sandbox.enabled"
        yield key, "is for agent.command, and agent.function runs in slimrl's own process. Leave it out."
    if not agent.command_sandbox.enabled:
        for name in ("paths", "network"):
            if getattr(agent.command_sandbox, name):
                yield f"agent.command_sandbox.{name}", "needs agent.command_sandbox.enabled: true."
    try:
        unspecified = ipaddress.ip_address(agent.gateway.host).is_unspecified
    except ValueError:
        yield "agent.gateway.host", f"{agent.gateway.host!r} is no IP address."
    else:
        if unspecified:
            yield "agent.gateway.host", "agents cannot ask this address. Give one that this machine has."


def gateway_file_violations(agent: AgentConfig) -> Iterator[Violation]:
    """The program of `agent.command` and paths of its sandbox that this machine lacks; reads the file system."""
    try:
        words = command_words(agent.command or [])
    except ValueError:  # which `gateway_violations` says
        words = []
    if words and words[0].strip() and shutil.which(words[0], path=agent.command_env.get("PATH")) is None:
        yield "agent.command", f"{words[0]!r}: no such program on this machine."
    for path in agent.command_sandbox.paths:
        if not os.path.exists(path):
            yield "agent.command_sandbox.paths", f"{path}: no such file or folder on this machine."


def gateway_warnings(recipe: Recipe) -> Iterator[Violation]:
    """A limit of one turn, which recipes for answers without tools have and others inherit from them."""
    if recipe.agent.uses_gateway and recipe.rollout.max_turns == 1:
        yield (
            "rollout.max_turns",
            "1: the agent gets one request, and its trajectory is truncated at the next one. Raise it for an agent "
            "that asks more than once.",
        )
