"""The environment and the other code of a recipe's episodes, resolved before anything starts."""

import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from slimrl.agent.chat.chat_format import CallName, ChatFormat, tool_results
from slimrl.agent.compaction import SummaryRule
from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.environment_class import check_arguments, check_class, check_made, check_roles
from slimrl.agent.episode import EpisodeLoop, run_turns
from slimrl.agent.gateway.agents import Agent, FunctionAgent
from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.agent.gateway.command_task import CommandTask, check_task
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.isolation.thread_environment import ThreadEnvironment
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, tools_of
from slimrl.config.agent_rules import command_words
from slimrl.config.import_path import parameters_of_type, resolve
from slimrl.config.schema.agent import IN_PROCESS, AgentConfig, CompactionConfig, IsolationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.environments.venvs import venv_python


def load_environment(recipe: Recipe, tools: ToolBox, sandbox: SandboxPool) -> MakeEnvironment:
    """Makes the environment of each trajectory: the recipe's own, or its tools.

    Args:
        sandbox: for the parameters of the environment that are annotated with SandboxPool.

    Raises:
        ValueError: there is no such class, it lacks a method, it does not take the recipe's arguments, or its `check`
            refuses them.
    """
    agent = recipe.agent
    if not agent.environment:
        return partial(ToolEnvironment, tools, agent, recipe.rollout.tool_timeout_s)
    if agent.environment_isolation not in IN_PROCESS:
        return _in_processes(agent)
    make = resolve(agent.environment, classes=True)
    supplied = dict.fromkeys(parameters_of_type(make, SandboxPool), sandbox)
    in_loop = agent.environment_isolation is IsolationMode.loop
    check_class(agent.environment, make, agent.environment_args, supplied=supplied, asynchronous=in_loop)
    asked = parameters_of_type(getattr(make, "check", None) or make, SandboxPool)
    check_arguments(agent.environment, make, dict.fromkeys(asked, sandbox) | agent.environment_args)
    check_roles(agent.environment, make, agent.roles)
    make_one = partial(make, **{**supplied, **agent.environment_args})
    return make_one if in_loop else partial(ThreadEnvironment, make_one)


def declared_roles(agent: AgentConfig, environment: MakeEnvironment) -> tuple[str, ...]:
    """The roles that the environment's class says it has, in `ROLES`; none if it does not say."""
    if isinstance(environment, EnvironmentServer):
        return environment.roles
    return tuple(getattr(resolve(agent.environment, classes=True), "ROLES", ())) if agent.environment else ()


def _in_processes(agent: AgentConfig) -> EnvironmentServer:
    in_venv = agent.environment_isolation is IsolationMode.venv
    python = _venv_python(agent.environment_venv) if in_venv else Path(sys.executable)
    server = EnvironmentServer(python, agent.environment, agent.environment_args, agent.close_timeout_s)
    server.check(agent.roles)
    return server


def _venv_python(name: str) -> Path:
    """Raises ValueError: the setting is empty, or names no virtual environment that is here."""
    if not name:
        raise ValueError("agent.environment_venv is not set; agent.environment_isolation venv needs it")
    try:
        return venv_python(name)
    except ValueError as error:
        raise ValueError(f"agent.environment_venv: {error}") from error


def load_subagents(agent: AgentConfig, sandbox: SandboxPool) -> dict[str, ToolBox]:
    """The tools of each sub-agent.

    Raises:
        ValueError: names the sub-agent and the path that leads to no function fit for a tool.
    """
    found = {}
    for name, settings in agent.subagents.items():
        try:
            found[name] = ToolBox(tools_of(settings.tools, agent.tool_args), sandbox)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def load_episode_loop(path: str) -> EpisodeLoop:
    """Raises ValueError: there is no such function, or it is not asynchronous with one argument."""
    if not path:
        return run_turns
    function = resolve(path, arguments=("episode",))
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}: is not `async def`, which an episode is")
    return function


def load_summary_rule(path: str) -> SummaryRule | None:
    """The function of `agent.compaction.function`, None without a path; raises ValueError if there is no such function
    of one argument."""
    return resolve(path, arguments=("messages",)) if path else None


def check_summary_request(compaction: CompactionConfig, chat: ChatFormat) -> None:
    """Raises ValueError if the chat template does not let a user speak after an answer, or after a tool's."""
    if compaction.at_tokens is None or compaction.function:
        return
    asked = {"role": "user", "content": compaction.prompt}
    call = CallName(id="functions.f:0", name="f")
    for end in chat.call_ends:
        chat.join(end, [call], [*tool_results([call], ["a result"]), asked], None)
    for end in chat.answer_ends:
        chat.join(end, [], [asked], None)


def load_agent(config: AgentConfig, sandbox: SandboxPool) -> Agent | None:
    """The agent behind the gateway; None for a recipe without one.

    Args:
        sandbox: for the parameters of the command's task that are annotated with SandboxPool.

    Raises:
        ValueError: there is no such function, or it does not take a data line and a connection; or there is no such
            task, or it does not take the recipe's arguments.
    """
    if config.command:
        program, *words = command_words(config.command)
        return CommandAgent(
            words=[_absolute(program) if "/" in program else program, *map(_absolute, words)],
            host=config.gateway.host,
            env=config.command_env,
            sandbox=config.command_sandbox,
            make_task=_task_of(config, sandbox) if config.command_task else None,
            task_path=config.command_task,
        )
    if config.function:
        function = resolve(config.function, arguments=("line", "connection"))
        return FunctionAgent(function=function, path=config.function)
    return None


def _task_of(config: AgentConfig, sandbox: SandboxPool) -> Callable[[], CommandTask]:
    """Makes the task of each trajectory's command. Raises ValueError."""
    make = resolve(config.command_task, classes=True)
    supplied = dict.fromkeys(parameters_of_type(make, SandboxPool), sandbox)
    check_task(config.command_task, make)
    check_made(config.command_task, make, config.command_task_args, supplied)
    check_arguments(config.command_task, make, config.command_task_args)
    return partial(make, **{**supplied, **config.command_task_args})


def _absolute(word: str) -> str:
    """The path of a file in full, since commands run in folders of their own; any other word as it is."""
    return os.path.abspath(word) if os.path.isfile(word) else word
