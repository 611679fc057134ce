"""The environment and the other code of a recipe's episodes, resolved before anything starts."""

import inspect
from functools import partial

from slimrl.agent.compaction import SummaryRule
from slimrl.agent.environment import MakeEnvironment
from slimrl.agent.episode import Play, play
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox
from slimrl.chat.chat_format import CallName, ChatFormat, tool_results
from slimrl.config.schema import AgentConfig, CompactionConfig, Recipe
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


def load_subagents(agent: AgentConfig) -> dict[str, ToolBox]:
    """The tools of each sub-agent.

    Raises:
        ValueError: names the sub-agent and the path that leads to no function fit for a tool.
    """
    found = {}
    for name, settings in agent.subagents.items():
        try:
            found[name] = ToolBox.from_import_paths(settings.tools)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return found


def load_play(path: str) -> Play:
    """Raises ValueError: there is no such function, or it is not asynchronous with one argument."""
    if not path:
        return play
    function = resolve(path, arguments=("episode",))
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{path}: is not `async def`, which an episode is")
    return function


def load_summary_rule(path: str) -> SummaryRule | None:
    """None without a path; raises ValueError if there is no such function of one argument."""
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
