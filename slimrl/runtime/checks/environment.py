"""The environment and the play of a recipe's episodes, resolved before anything starts."""

import inspect
from functools import partial

from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.episode import Play, play
from slimrl.agent.gateway.agents import Agent, CommandAgent, FunctionAgent
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox
from slimrl.config.gateway_rules import command_words
from slimrl.config.schema import AgentConfig, Recipe
from slimrl.data.import_path import resolve

METHODS = ("start", "step", "close")


def load_environment(recipe: Recipe, tools: ToolBox) -> MakeEnvironment:
    """Makes the environment of each trajectory: the recipe's own, or its tools.

    Raises:
        ValueError: there is no such class, it lacks a method, or it does not take the recipe's arguments.
    """
    agent = recipe.agent
    if not agent.environment:
        return partial(ToolEnvironment, tools, agent, recipe.rollout.tool_timeout_s)
    make = resolve(agent.environment, classes=True)
    if isinstance(make, type):
        for name in METHODS:
            if not inspect.iscoroutinefunction(getattr(make, name, None)):
                raise ValueError(f"{agent.environment}: has no `async def {name}`, which an environment has")
    try:
        inspect.signature(make).bind(**agent.environment_args)
    except TypeError as error:
        given = ", ".join(agent.environment_args) or "no arguments"
        raise ValueError(f"{agent.environment}: cannot be made with {given}: {error}") from error
    return partial(make, **agent.environment_args)


def load_play(path: str) -> Play:
    """Raises ValueError: there is no such function, or it is not asynchronous with one argument."""
    if not path:
        return play
    function = resolve(path, arguments=("episode",))
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}: is not `async def`, which an episode is")
    return function


def load_agent(config: AgentConfig) -> Agent | None:
    """The agent behind the gateway; None for a recipe without one.

    Raises:
        ValueError: there is no such function, or it does not take a data line and a connection.
    """
    if config.command:
        return CommandAgent(words=command_words(config.command), host=config.gateway.host)
    if config.function:
        function = resolve(config.function, arguments=("line", "connection"))
        return FunctionAgent(function=function, path=config.function)
    return None
