"""Histories of messages in one form, so that what a client sends back is known again.

Clients write the same history in many ways: arguments of calls as text with other spaces or another order, content as
a list of parts, ids that are absent or their own, None for an empty text. `canonical` gives each history one form, in
which every call has its answer after it, in the order of the calls. `history_key` leaves out ids and thinking: a
history is known by its texts, its calls' names and arguments, and the tools that the policy is shown. Of what the
assistant said it also leaves out what clients change without meaning to: blanks around a text, ends of lines, nulls in
arguments, and digits of whole numbers beyond what JavaScript keeps. `echo` tells an answer that comes back.
"""

import hashlib
import json
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.environment import Message
from slimrl.agent.gateway.errors import refused

MAX_SAFE_INTEGER = 2**53 - 1
"""Largest whole number below which JavaScript tells all of them apart"""
MAX_FLOAT = int(sys.float_info.max)


def canonical(messages: Sequence[Message]) -> list[Message]:
    """
    Args:
        messages: of roles system, user, assistant and tool with a text as content; arguments of calls are objects.

    Raises:
        ApiError: there are none, the last one is the policy's, or calls and their answers do not belong together.
    """
    if not messages:
        raise refused("there are no messages")
    if messages[-1]["role"] == "assistant":
        raise refused("the last message is the assistant's; assistant prefill is not supported")
    ordered: list[Message] = []
    place, num_calls = 0, 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message["role"] == "tool":
            raise refused(f"messages[{place - 1}]: a tool's answer without a call before it")
        calls = message.get("tool_calls")
        if not calls:
            ordered.append({name: value for name, value in message.items() if name != "tool_calls"})
            continue
        named = [{**call, "id": call.get("id") or f"call_{num_calls + number}"} for number, call in enumerate(calls)]
        num_calls += len(named)
        ordered.append({**message, "tool_calls": named})
        answers = list(_leading_answers(messages[place:]))
        ordered += _in_order(named, answers, place)
        place += len(answers)
    return ordered


def _leading_answers(messages: Sequence[Message]) -> Sequence[Message]:
    count = next((number for number, one in enumerate(messages) if one["role"] != "tool"), len(messages))
    return messages[:count]


def _in_order(calls: Sequence[dict[str, Any]], answers: Sequence[Message], place: int) -> list[Message]:
    """One answer for each call, in the order of the calls. An answer is that of the first call with its id, or without
    an id of the first call, that has no answer yet."""
    open_calls = dict(enumerate(calls))
    numbers = defaultdict[str, deque[int]](deque)
    for number, call in open_calls.items():
        numbers[call["id"]].append(number)
    given: dict[int, Message] = {}
    for place_of_answer, answer in enumerate(answers, place):
        call_id = answer.get("tool_call_id") or next((call["id"] for call in open_calls.values()), None)
        if not (those := numbers.get(call_id or "")):
            told = f"messages[{place_of_answer}]: answers the call {call_id!r}"
            raise refused(f"{told}, which is none of the message before it")
        number = those.popleft()
        name = open_calls.pop(number)["function"]["name"]
        given[number] = {"role": "tool", "name": name, "tool_call_id": call_id, "content": answer["content"]}
    if open_calls:
        missing = ", ".join(call["id"] for call in open_calls.values())
        raise refused(f"messages[{place - 1}]: the calls {missing} have no answers after them")
    return [given[number] for number in range(len(calls))]


def escaped(messages: Sequence[Message], chat: ChatFormat) -> list[Message]:
    """The messages with the special tokens broken up in what the policy was told after its first turn."""
    first = next((number for number, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    return [
        {**one, "content": chat.template.escape(one["content"])}
        if number > first and one["role"] != "assistant"
        else one
        for number, one in enumerate(messages)
    ]


def history_key(tools: Sequence[dict[str, Any]], messages: Sequence[Message], role: str = "") -> bytes:
    """Hash of a history: equal for equal histories of the same role.

    Args:
        messages: canonical ones.
    """
    said = [
        [
            message["role"],
            _words(message) if message["role"] == "assistant" else message["content"],
            _call_keys(message),
        ]
        for message in messages
    ]
    return hashlib.sha256(_dumped([tools, said, *([role] if role else [])]).encode()).digest()


@dataclass(frozen=True, kw_only=True)
class Echo:
    """How a client gives back what the policy said."""

    is_whole: bool
    """Whether the client gave back the words before a call too"""
    added: str | None = None
    """Text that the client wrote behind the stop text that ended the turn; None if that text is not there either"""


def echo(said: Message, given: Message, stop_text: str | None) -> Echo | None:
    """How the client gives back a message of the policy; None if the message is another one.

    Args:
        stop_text: that ended the turn and is no part of `said`.
    """
    if _dumped(_call_keys(said)) != _dumped(_call_keys(given)):
        return None
    ours, theirs = _words(said), _words(given)
    if ours == theirs:
        return Echo(is_whole=True)
    if stop_text is not None and theirs.startswith(ours + stop_text):
        return Echo(is_whole=True, added=theirs[len(ours + stop_text) :])
    return Echo(is_whole=False) if said.get("tool_calls") and not theirs else None


def _dumped(value: Any) -> str:
    """JSON text of a value, in which true differs from 1; in Python they are equal."""
    return json.dumps(value, sort_keys=True)


def _words(message: Message) -> str:
    text: str = message["content"]
    return text.replace("\r\n", "\n").strip()


def _call_keys(message: Message) -> list[Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [[call["name"], _plain(call["arguments"])] for call in calls]


def _plain(value: Any) -> Any:
    """The value as a client of JavaScript may give it back: 1.0 is 1, integers are those of 64-bit floats, and fields
    that are null may be left out."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and MAX_SAFE_INTEGER < abs(value) < MAX_FLOAT:
        return int(float(value))
    return value
