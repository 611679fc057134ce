"""Rules of the section `agent`: environments, workers, compaction, sub-agents, tools of other servers, the sandbox, and
agents behind the gateway."""

import importlib.util
import ipaddress
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.config.package_fields import tool_call_parsers
from slimrl.config.problems import Violation, suggestion
from slimrl.config.schema.agent import PAST, POLICY, AgentConfig, HistoryMode, IsolationMode, SandboxBackend
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MODULE_FUNCTION
from slimrl.config.search_rules import most_environments

TOOL_PROMPTS = ("deepseek_v3", "deepseek_v31", "deepseek_v32")
"""Published prompts that tell a model its tools (slimrl/agent/chat/tool_prompts.py)"""
HARMONY = "harmony"
"""slimrl's own parser, of gpt-oss's calls"""
SEARCH_TOOL = "slimrl.agent.search:search"
"""Import path of the tool whose dense retriever needs an index (slimrl/agent/retrieval/corpus_index.py)"""
TOOL_NAME = re.compile(r"[A-Za-z_]\w{0,63}")


def chat_violations(agent: AgentConfig) -> Iterator[Violation]:
    """Names of parsers and of prompts that nothing has."""
    known = (HARMONY, *tool_call_parsers()) if agent.parser else ()
    if agent.parser and agent.parser not in known and not MODULE_FUNCTION.fullmatch(agent.parser):
        meant = suggestion(agent.parser, known) or f" SGLang has {', '.join(known[1:])}; slimrl {HARMONY}."
        yield "agent.parser", f"{agent.parser!r} is neither a parser of SGLang nor an import path module:name.{meant}"
    told = agent.tool_prompt
    if told and told not in TOOL_PROMPTS and "{tools}" not in told:
        names = ", ".join(TOOL_PROMPTS)
        yield "agent.tool_prompt", f"{told!r} is neither {names}, nor a text with {{tools}} where the schemas go."


def agent_violations(recipe: Recipe) -> Iterator[Violation]:
    agent = recipe.agent
    if agent.environment:
        for name in ("tools", "tool_args", "mcp", "subagents", "max_tool_calls", "system_prompt"):
            if getattr(agent, name):
                message = "agent.environment says that itself. Leave it out, or set [] or null over an inherited one."
                yield f"agent.{name}", message
    elif agent.environment_args:
        yield "agent.environment_args", "there is no agent.environment to take them."
    elif agent.environment_isolation is not IsolationMode.loop:
        yield "agent.environment_isolation", "there is no agent.environment to isolate."
    in_venv = agent.environment_isolation is IsolationMode.venv
    if in_venv and not agent.environment_venv:
        yield (
            "agent.environment_venv",
            "agent.environment_isolation venv needs it. Use a name that `slimrl-tools environment list` shows, or the "
            "folder of a virtual environment.",
        )
    if agent.environment_venv and not in_venv:
        yield "agent.environment_venv", "has no effect without agent.environment_isolation venv."
    if agent.workers > 1 and recipe.deterministic:
        yield (
            "agent.workers",
            f"{agent.workers}: a deterministic run forms the engines' batches from all episodes in one process. Use 1, "
            "or deterministic false.",
        )
    if agent.uses_gateway:
        yield from gateway_violations(agent)
    yield from _role_violations(agent)
    if agent.command_task and not agent.command:
        yield "agent.command_task", "there is no agent.command whose folder it could fill."
    elif agent.command_task_args and not agent.command_task:
        yield "agent.command_task_args", "there is no agent.command_task to take them."
    yield from mcp_violations(agent)
    yield from sandbox_violations(recipe)
    yield from _compaction_violations(recipe)
    for name, subagent in agent.subagents.items():
        key = f"agent.subagents.{name}"
        if not TOOL_NAME.fullmatch(name):
            yield key, f"{name!r} is not a name of a tool; use letters, digits and '_'."
        if name in [path.rpartition(":")[2] for path in agent.tools]:
            yield key, "a tool of agent.tools has this name too. Use another."
        if subagent.max_turns >= recipe.rollout.max_turns:
            yield (
                f"{key}.max_turns",
                f"{subagent.max_turns}: its turns count in rollout.max_turns {recipe.rollout.max_turns}, with two of "
                "its caller's. Use less, or more there.",
            )


def _role_violations(agent: AgentConfig) -> Iterator[Violation]:
    if agent.players and not agent.environment:
        yield "agent.players", "there is no agent.environment with roles that they could play."
    if agent.roles and not agent.environment and not agent.uses_gateway:
        yield "agent.roles", "there is neither an agent.environment nor an agent behind the gateway that has roles."
    if POLICY in agent.players:
        yield f"agent.players.{POLICY}", "is the model that is trained, and needs no entry."
    if PAST in agent.players:
        yield (
            f"agent.players.{PAST}",
            "stands for older versions of the policy. Use another name.",
        )
    for name, role in agent.roles.items():
        key = f"agent.roles.{name}.player"
        if role.player == PAST and not agent.past_versions.every_steps:
            yield key, f"{PAST} is an older version of the policy. Set agent.past_versions.every_steps."
        elif role.player not in agent.player_names:
            meant = suggestion(role.player, agent.player_names)
            yield key, f"{role.player!r} is neither {POLICY} nor one of agent.players.{meant}"


def agent_file_violations(recipe: Recipe) -> Iterator[Violation]:
    """What an agent behind the gateway or a dense retriever needs and this machine lacks; reads the file system."""
    if recipe.agent.uses_gateway:
        yield from gateway_file_violations(recipe.agent)
    yield from _index_violations(recipe.agent)


def _index_violations(agent: AgentConfig) -> Iterator[Violation]:
    """The index of vectors, which the first search would miss."""
    tools = [*agent.tools, *(path for subagent in agent.subagents.values() for path in subagent.tools)]
    corpus = agent.tool_args.get("corpus")
    if SEARCH_TOOL not in tools or agent.tool_args.get("retriever") != "dense" or not isinstance(corpus, str):
        return
    if not Path(f"{corpus}.index", "dense", "index.json").is_file():
        encoder = agent.tool_args.get("encoder", "FOLDER")
        make = f"slimrl-tools search-index {corpus} --encoder {encoder}"
        yield "agent.tool_args.corpus", f"{corpus}: has no index of vectors. Make it: {make}"


def agent_warnings(recipe: Recipe) -> Iterator[Violation]:
    """(key, what is probably not meant) of an agent."""
    if recipe.agent.uses_gateway:
        yield from gateway_warnings(recipe)


def _compaction_violations(recipe: Recipe) -> Iterator[Violation]:
    compaction, limit = recipe.agent.compaction, recipe.rollout.max_trajectory_tokens
    if compaction.at_tokens is None:
        if compaction.function:
            yield "agent.compaction.function", "nothing is compacted without agent.compaction.at_tokens."
        return
    if compaction.at_tokens >= limit:
        yield (
            "agent.compaction.at_tokens",
            f"{compaction.at_tokens}: a context ends at rollout.max_trajectory_tokens {limit}. Use less.",
        )
    if recipe.agent.history is not HistoryMode.keep:
        yield "agent.compaction.at_tokens", "needs agent.history keep."


def mcp_violations(agent: AgentConfig) -> Iterator[Violation]:
    """Servers without an address or with two, settings of the other kind, and the package that is absent."""
    if agent.mcp and importlib.util.find_spec("mcp") is None:
        yield "agent.mcp", "needs the package mcp. Install it with: pip install -c requirements/lock.txt -e '.[mcp]'"
    for name, server in agent.mcp.items():
        key = f"agent.mcp.{name}"
        if bool(server.command) == bool(server.url):
            yield key, "needs either command or url."
        elif server.url and not server.url.startswith(("http://", "https://")):
            yield f"{key}.url", f"{server.url!r} does not begin with http:// or https://."
        elif server.url and server.env:
            yield f"{key}.env", "has no effect on a server by URL. Give headers, or leave it out."
        elif server.command and server.headers:
            yield f"{key}.headers", "a command has none. Give env, or leave it out."
        for unshown in sorted(set(server.pure) - set(server.tools)) if server.tools else ():
            yield f"{key}.pure", f"{unshown} is not among the tools that {key}.tools shows."


SANDBOX_TOOLS = "slimrl.agent.sandbox.tools:"
"""Start of the import paths of tools that run code in the sandbox"""
SESSION_TOOLS = (f"{SANDBOX_TOOLS}python_session", f"{SANDBOX_TOOLS}shell")
"""Import paths of the sandbox tools that keep a session for each trajectory"""
SESSION_ENVIRONMENTS = (
    "slimrl.environments.software_repair.environment:SoftwareRepair",
    "slimrl.environments.swe_bench.environment:SweBench",
)
"""Import paths of the environments that do"""
WITHOUT_SESSIONS = (SandboxBackend.subprocess, SandboxBackend.remote)


def sandbox_violations(recipe: Recipe) -> Iterator[Violation]:
    """Tools whose answers come too late, sessions that no backend or no place is for, and an address that is none."""
    sandbox, timeout_s = recipe.agent.sandbox, recipe.rollout.tool_timeout_s
    with_sessions = [path for path in recipe.agent.tools if path in SESSION_TOOLS]
    with_sessions += [path for path in SESSION_ENVIRONMENTS if path == recipe.agent.environment]
    num_trajectories = recipe.rollout.max_concurrency_per_engine * recipe.rollout.most_engines
    num_branches = most_environments(recipe)
    num_sessions = len(with_sessions) * num_trajectories * num_branches
    if with_sessions and sandbox.backend in WITHOUT_SESSIONS:
        yield "agent.sandbox.backend", f"{sandbox.backend.value} has no sessions, which {with_sessions[0]} needs."
    elif num_sessions > sandbox.max_sessions:
        searched = f", each up to {num_branches} environments of its search" if num_branches > 1 else ""
        instead = " or more, or a lower rollout.max_concurrency_per_engine" if num_branches > 1 else ""
        yield (
            "agent.sandbox.max_sessions",
            f"{sandbox.max_sessions}: trajectories keep their sessions, {num_sessions} at a time with "
            f"rollout.max_concurrency_per_engine{searched}, and others would wait in vain. "
            f"Use {num_sessions}{instead}.",
        )
    runs_code = any(path.startswith(SANDBOX_TOOLS) for path in recipe.agent.tools)
    if runs_code and sandbox.limits.wall_s >= timeout_s:
        yield (
            "agent.sandbox.limits.wall_s",
            f"{sandbox.limits.wall_s}: the call ends before, after rollout.tool_timeout_s {timeout_s}, and the policy "
            "does not hear what the program printed. Use less.",
        )
    if sandbox.all_nodes and sandbox.backend is SandboxBackend.remote:
        yield "agent.sandbox.all_nodes", "the remote server runs the code, on no node of the cluster. Use false."
    if sandbox.all_nodes and recipe.agent.workers > 1:
        yield "agent.sandbox.all_nodes", f"agent.workers {recipe.agent.workers} have sandboxes here alone. Use false."
    if sandbox.backend is SandboxBackend.remote and not sandbox.url.startswith(("http://", "https://")):
        yield "agent.sandbox.url", f"{sandbox.url!r} is no URL; write http://HOST:PORT."


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
