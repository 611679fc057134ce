"""The environment and the play of a recipe's episodes, resolved before anything starts."""

import inspect
from functools import partial

from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.episode import Play, play
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox
from slimrl.config.schema import Recipe
from slimrl.data.import_path import parameters_of_type, resolve

METHODS = ("start", "step", "close")


def load_environment(recipe: Recipe, tools: ToolBox, sandbox: SandboxPool) -> MakeEnvironment:
    """Makes the environment of each trajectory: the recipe's own, or its tools.

    Args:
        sandbox: for the parameters of the environment that are annotated with SandboxPool.

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
    given = {**dict.fromkeys(parameters_of_type(make, SandboxPool), sandbox), **agent.environment_args}
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        said = ", ".join(agent.environment_args) or "no arguments"
        raise ValueError(f"{agent.environment}: cannot be made with {said}: {error}") from error
    return partial(make, **given)


def load_play(path: str) -> Play:
    """Raises ValueError: there is no such function, or it is not asynchronous with one argument."""
    if not path:
        return play
    function = resolve(path, arguments=("episode",))
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}: is not `async def`, which an episode is")
    return function
