"""Rules of the episodes: what belongs to an environment, workers, servers of tools, compaction, sub-agents."""

import re
from collections.abc import Iterator

from slimrl.config.mcp_rules import mcp_violations
from slimrl.config.package_fields import tool_call_parsers
from slimrl.config.problems import Violation, suggestion
from slimrl.config.sandbox_rules import sandbox_violations
from slimrl.config.schema.agent import AgentConfig, HistoryMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.types import MODULE_FUNCTION

TOOL_PROMPTS = ("deepseek_v3", "deepseek_v31")
"""Published prompts that tell a model its tools (slimrl/agent/chat/tool_prompts.py)"""
TOOL_NAME = re.compile(r"[A-Za-z_]\w{0,63}")


def chat_violations(agent: AgentConfig) -> Iterator[Violation]:
    """Names of parsers and of prompts that nothing has."""
    if agent.parser and agent.parser not in tool_call_parsers() and not MODULE_FUNCTION.fullmatch(agent.parser):
        known = tool_call_parsers()
        meant = suggestion(agent.parser, known) or f" SGLang has {', '.join(known)}."
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
