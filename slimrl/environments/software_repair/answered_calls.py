"""Answers the calls of a turn of repair: `submit`, what cannot be run, and the rest."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from slimrl.agent.environment import Message, Turn, answers, error_text
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.environments.software_repair.tools import problem


@dataclass(frozen=True, kw_only=True)
class Answered:
    messages: list[Message]
    errors: list[str]
    """Names of the tools whose calls were answered with an error"""
    submitted: bool
    """Whether the repair is said to be complete: by `submit`, or by a turn without a call"""


async def answer_calls(turn: Turn, do: Callable[[ToolCall], Awaitable[str]]) -> Answered:
    """
    Args:
        do: what a call of `bash` or `edit` answers.
    """
    results: list[str] = []
    errors, submitted = [], not turn.calls
    for call in turn.calls:
        if submitted:
            results.append(error_text("the repair was submitted"))
            continue
        if isinstance(call, MalformedCall):
            said = error_text(call.problem)
        elif wrong := problem(call.name, call.arguments):
            said = error_text(wrong)
        elif call.name == "submit":
            submitted, said = True, "submitted"
        else:
            said = await do(call)
        results.append(said)
        if said.startswith("error:"):
            errors.append(call.name or "unknown")
    return Answered(messages=answers(turn, results), errors=errors, submitted=submitted)
