"""What a trajectory gets when its episode ends: tokens, messages and counts."""

from typing import Any

from slimrl.agent.conversation import Conversation
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.roles.conversations import Conversations
from slimrl.agent.subagents import add_tool_counts
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory


def complete(trajectory: Trajectory, conversations: Conversations | None, host: EnvironmentHost) -> None:
    """Add the tokens, the messages and the figures of an episode that has ended."""
    counts, num_turns = _no_counts(), 0
    if conversations is not None:
        trajectory.segments, trajectory.messages = conversations.segments, conversations.messages
        num_turns = conversations.num_turns
        first, *_ = conversations.by_role.values()
        trajectory.tools = {role: list(one.tools) for role, one in conversations.by_role.items() if one.tools}
        counts |= {"num_turns": num_turns, "num_prompt_messages": first.num_prompt_messages}
        for conversation in conversations.of_policy:
            _add_counts(counts, conversation)
    trajectory.measured, trajectory.images = host.measured, host.images
    trajectory.metadata = {**counts, **trajectory.metadata, "environment": host.finished_report(num_turns).to_json()}


def _add_counts(counts: dict[str, Any], conversation: Conversation) -> None:
    more = {
        "num_tool_calls": conversation.num_calls,
        "num_tool_errors": sum(counts["errors"] for counts in conversation.tool_calls.values()),
        "num_malformed_calls": sum(counts["malformed"] for counts in conversation.tool_calls.values()),
        "num_cached_tokens": conversation.num_cached_tokens,
        "num_retries": conversation.num_retries,
    }
    optional = {
        "num_subagents": len(conversation.subagents),
        "num_compactions": conversation.num_compactions,
        **conversation.engine_counts,
    }
    for key, count in (more | {key: count for key, count in optional.items() if count}).items():
        counts[key] = counts.get(key, 0) + count
    add_tool_counts(counts["tool_calls"], conversation.tool_calls)
    if conversation.subagents:
        counts["subagents"] = conversation.subagents


def failed_trajectory(prompt: Prompt, trajectory_id: str, cause: str) -> Trajectory:
    """The trajectory of an episode of which nothing is left."""
    return Trajectory(
        group_id=prompt.prompt_id,
        trajectory_id=trajectory_id,
        segments=[],
        status=Status.failed,
        metadata={**_no_counts(), "error": cause, "environment": {}},
    )


def _no_counts() -> dict[str, Any]:
    return {**dict.fromkeys(COUNTS, 0), "tool_calls": {}}


COUNTS = (
    "num_turns", "num_tool_calls", "num_tool_errors", "num_malformed_calls", "num_cached_tokens", "num_retries",
    "num_prompt_messages",
)  # fmt: skip
"""Names of the counts in each trajectory's metadata"""
