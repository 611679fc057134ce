"""Sub-agents: the policy itself with a task, a context and tools of its own, shown to it as tools (`agent.subagents`).

1. A call is an episode that starts from the call's task. Its answer is the last that it says.
2. Its tokens are segments of the calling trajectory, in the turn that called it, and are trained as one with it.
3. It uses the trajectory's own turns, tokens and calls: what is left is shared out evenly among the sub-agents that a
   turn calls, so that what each may use depends on none of the others. Its time is the trajectory's.
4. A sub-agent has no sub-agents.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimrl.agent.tools import Tool, ToolAnswer
from slimrl.config.schema.agent import SubagentConfig
from slimrl.data.trajectory import Segment, Status, Trajectory

TASK = "task"
"""Name of a sub-agent's argument, the task."""


@dataclass(frozen=True, kw_only=True)
class Delegation:
    """A call of a sub-agent."""

    name: str
    task: str
    number: int
    """Number of the call among those of its turn"""
    num_parallel: int
    """Number of sub-agents that the turn calls"""
    max_calls: int | None
    """Largest number of tool calls that the sub-agent may make; None for no limit"""


@dataclass(frozen=True, kw_only=True)
class DelegateAnswer:
    answer: ToolAnswer
    num_calls: int
    """Number of tool calls that the sub-agent made"""


Delegate = Callable[[Delegation], Awaitable[DelegateAnswer]]
"""Runs a sub-agent to its end. Raises EnvironmentFailure if it fails."""


def subagent_tool(name: str, settings: SubagentConfig) -> Tool:
    """The tool as which a sub-agent is shown to the policy."""

    async def run(task: str) -> str:
        raise AssertionError("the environment of the tools gives the call to its episode")

    return Tool(name=name, function=run, schema=_schema(name, settings))


def _schema(name: str, settings: SubagentConfig) -> dict[str, Any]:
    task = {"type": "string", "description": "What to do, with all that is needed for it."}
    parameters = {"type": "object", "properties": {TASK: task}, "required": [TASK]}
    return {
        "type": "function",
        "function": {"name": name, "description": settings.description, "parameters": parameters},
    }


def answer_of(trajectory: Trajectory) -> ToolAnswer:
    """The text that the calling policy gets from an episode that has not failed."""
    said = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    if trajectory.status is Status.completed and said:
        return ToolAnswer(text=str(said[-1]))
    return ToolAnswer(text="error: it ran out of turns or tokens before it answered", is_error=True)


def segments_in_turn(trajectory: Trajectory, turn: int) -> list[Segment]:
    """The segments of a sub-agent, all of whose turns are one of the caller's."""
    for segment in trajectory.segments:
        segment.turn_ids = np.where(segment.turn_ids < 0, segment.turn_ids, turn).astype(np.int16)
    return trajectory.segments


def account_of(delegation: Delegation, trajectory: Trajectory, *, turn: int, first_segment: int) -> dict[str, Any]:
    """What a reader of the calling trajectory is told of a sub-agent, as JSON values (docs/data_formats.md).

    Args:
        turn: number of the caller's turn.
        first_segment: number of the sub-agent's first segment among those of the calling trajectory.
    """
    return {
        "name": delegation.name,
        "turn": turn,
        "call": delegation.number,
        "status": trajectory.status.value,
        "segments": [first_segment, first_segment + len(trajectory.segments)],
        "num_prompt_messages": trajectory.metadata["num_prompt_messages"],
        "messages": trajectory.messages,
    }


def add_tool_counts(counts: dict[str, dict[str, int]], more: Mapping[str, Mapping[str, int]]) -> None:
    """Add what a sub-agent called to the caller's counts by tool."""
    for name, values in more.items():
        own = counts.setdefault(name, dict.fromkeys(values, 0))
        for key, value in values.items():
            own[key] += value
