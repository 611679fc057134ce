"""Rules of the episodes: what belongs to an environment, workers, servers of tools, compaction, sub-agents."""

import re
from collections.abc import Iterator

from slimrl.config.bounds import MODULE_FUNCTION, no_import_path
from slimrl.config.mcp_rules import mcp_violations
from slimrl.config.problems import Violation
from slimrl.config.sandbox_rules import sandbox_violations
from slimrl.config.schema.agent import HistoryMode
from slimrl.config.schema.recipe import Recipe

TOOL_NAME = re.compile(r"[A-Za-z_]\w{0,63}")


def agent_violations(recipe: Recipe) -> Iterator[Violation]:
    agent = recipe.agent
    if agent.environment:
        for name in ("tools", "tool_args", "mcp", "subagents", "max_tool_calls", "system_prompt"):
            if getattr(agent, name):
                message = "agent.environment says that itself. Leave it out, or set [] or null over an inherited one."
                yield f"agent.{name}", message
    elif agent.environment_args:
        yield "agent.environment_args", "there is no agent.environment to take them."
    if agent.workers > 1 and recipe.deterministic:
        yield (
            "agent.workers",
            f"{agent.workers}: a deterministic run forms the engines' batches from all episodes in one process. Use 1, "
            "or deterministic false.",
        )
    if agent.uses_gateway:
        # Recipes without such an agent are checked sooner without it.
        from slimrl.config.gateway_rules import gateway_violations

        yield from gateway_violations(agent)
    yield from mcp_violations(agent)
    yield from sandbox_violations(recipe)
    yield from _compaction_violations(recipe)
    for name, subagent in agent.subagents.items():
        key = f"agent.subagents.{name}"
        if not TOOL_NAME.fullmatch(name):
            yield key, f"{name!r} is not a name of a tool; use letters, digits and '_'."
        if name in [path.rpartition(":")[2] for path in agent.tools]:
            yield key, "a tool of agent.tools has this name too. Use another."
        for path in subagent.tools:
            if not MODULE_FUNCTION.fullmatch(path):
                yield f"{key}.tools", no_import_path(path)
        if subagent.max_turns >= recipe.rollout.max_turns:
            yield (
                f"{key}.max_turns",
                f"{subagent.max_turns}: its turns count in rollout.max_turns {recipe.rollout.max_turns}, with two of "
                "its caller's. Use less, or more there.",
            )


def agent_file_violations(recipe: Recipe) -> Iterator[Violation]:
    """What an agent behind the gateway needs and this machine lacks; reads the file system."""
    if recipe.agent.uses_gateway:
        from slimrl.config.gateway_rules import gateway_file_violations

        yield from gateway_file_violations(recipe.agent)


def agent_warnings(recipe: Recipe) -> Iterator[Violation]:
    """(key, what is probably not meant) of an agent."""
    if recipe.agent.uses_gateway:
        from slimrl.config.gateway_rules import gateway_warnings

        yield from gateway_warnings(recipe)


def _compaction_violations(recipe: Recipe) -> Iterator[Violation]:
    compaction, limit = recipe.agent.compaction, recipe.rollout.max_trajectory_tokens
    if compaction.function and not MODULE_FUNCTION.fullmatch(compaction.function):
        yield "agent.compaction.function", no_import_path(compaction.function)
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
