"""Compaction of a context that has become long (`agent.compaction`).

1. The messages after a turn would bring the context to `at_tokens`.
2. The policy is asked for a summary before its next turn, or a rule writes one.
3. A new segment begins: the first messages with the summary at their end, then the newest turns and what they led to.
"""

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Sequence

from slimrl.agent.environment import EnvironmentFailure, Message
from slimrl.base.threads import in_thread, reportable

SummaryRule = Callable[[list[Message]], str | Awaitable[str]]
"""Function that gives the summary of a context's messages."""


def compacted(messages: Sequence[Message], num_first: int, summary: str, keep_turns: int) -> list[Message]:
    """The messages of the new context.

    Args:
        num_first: messages before the first turn. They stay; the summary ends the last of them, since many templates
            refuse two messages of a user in a row.
        keep_turns: newest turns that stay.
    """
    *first, last = messages[:num_first]
    turns = [place for place, message in enumerate(messages) if place >= num_first and message["role"] == "assistant"]
    kept = messages[turns[-keep_turns] :] if 0 < keep_turns < len(turns) else messages[num_first:] if keep_turns else []
    return [*first, {**last, "content": f"{last['content']}\n\n{summary}"}, *kept]


async def summary_of(rule: SummaryRule, messages: Sequence[Message], timeout_s: float) -> str:
    """What a rule writes; a synchronous one runs in a thread.

    Raises:
        EnvironmentFailure: it raised, was late, or returned no text.
    """
    given = copy.deepcopy(list(messages))
    name = "agent.compaction.function"
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            written = await rule(given) if inspect.iscoroutinefunction(rule) else await in_thread(lambda: rule(given))
    except TimeoutError as error:
        cause = f"took longer than {timeout_s:g} s" if deadline.expired() else f"raised {error!r}"
        raise EnvironmentFailure(f"{name}: {cause}") from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own code may raise anything
        raise EnvironmentFailure(f"{name}: raised {error!r}") from reportable(error)
    if not isinstance(written, str):
        raise EnvironmentFailure(f"{name}: returned {written!r}, not text")
    return written
