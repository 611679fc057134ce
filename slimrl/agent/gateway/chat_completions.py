"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from slimrl.agent.environment import Message
from slimrl.agent.gateway.body import (
    Body,
    Choices,
    Content,
    Count,
    Listed,
    Loose,
    Object,
    OtherTool,
    assistant_message,
    call_of,
    function_schema,
    judged,
    own_tools,
    text_of,
)
from slimrl.agent.gateway.chat_request import ChatRequest, Reply, token_logprobs
from slimrl.agent.gateway.errors import openai_error
from slimrl.agent.gateway.events import data_event
from slimrl.agent.gateway.fields import CHAT_COMPLETIONS
from slimrl.agent.gateway.history import SampledTurn
from slimrl.agent.gateway.messages import canonical
from slimrl.agent.gateway.openai_body import Called, Function

PATH = "/chat/completions"
error_body = openai_error


class Call(Loose):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Told(Object):
    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class Said(Loose):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class Answered(Object):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


class Tool(Object):
    type: Literal["function"] = "function"
    function: Function


class StreamOptions(Object):
    include_usage: bool = False


AnyTool = Annotated[Annotated[Tool, Tag("tool")] | Annotated[OtherTool, Tag("other")], own_tools("function", None)]


class ChatBody(Body):
    messages: list[Annotated[Told | Said | Answered, Field(discriminator="role")]]
    tools: list[AnyTool] = Field(default_factory=list)
    n: Choices = 1
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Listed = Field(default_factory=list)
    logprobs: bool = False


def read(value: Mapping[str, Any], replies: Mapping[str, Reply]) -> tuple[ChatBody, ChatRequest]:
    """Raises ValidationError or ApiError."""
    body = ChatBody.model_validate(value)
    replaced, ignored = judged(body, CHAT_COMPLETIONS)
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    return body, ChatRequest(
        messages=canonical([_message(one, f"messages[{number}]") for number, one in enumerate(body.messages)]),
        tools=[
            function_schema(one.function.name, one.function.description, one.function.parameters)
            for one in body.tools
            if body.shows_tools and isinstance(one, Tool)
        ],
        n=body.n,
        max_tokens=min(limits, default=None),
        stop=tuple(body.stop),
        sampling=replaced,
        ignored=ignored,
    )


def answer(body: ChatBody, reply: Reply) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {**_spoken(turn), "refusal": None},
            "logprobs": _logprobs(body, turn, reply),
            "finish_reason": _finish(turn),
        }
        for index, turn in enumerate(reply.turns)
    ]
    return {**_head(body, reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


def events(body: ChatBody, reply: Reply) -> Iterator[bytes]:
    """The answer as server-sent events."""
    head = _head(body, reply, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return data_event({**head, "choices": [choice]})

    for index, turn in enumerate(reply.turns):
        said = _spoken(turn)
        calls = said.pop("tool_calls", [])
        yield chunk(index, {"role": "assistant", "content": ""})
        if reasoning := said.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": reasoning})
        yield chunk(index, {"content": said["content"] or ""}, logprobs=_logprobs(body, turn, reply))
        for number, call in enumerate(calls):
            opened = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
            yield chunk(index, {"tool_calls": [opened]})
            rest = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
            yield chunk(index, {"tool_calls": [rest]})
        yield chunk(index, {}, finish_reason=_finish(turn))
    if body.stream_options.include_usage:
        yield data_event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _message(given: Told | Said | Answered, where: str) -> Message:
    if isinstance(given, Answered):
        return {"role": "tool", "content": text_of(given.content), "tool_call_id": given.tool_call_id}
    if isinstance(given, Told):
        role = "system" if given.role == "developer" else given.role
        named = {} if given.name is None else {"name": given.name}
        return {"role": role, "content": text_of(given.content), **named}
    calls = [
        call_of(call.id, call.function.name, call.function.parsed(where), where) for call in given.tool_calls or ()
    ]
    return assistant_message(text_of(given.content), calls, given.reasoning_content)


def _spoken(turn: SampledTurn) -> dict[str, Any]:
    """A turn as a message, its arguments as text."""
    message = dict(turn.parsed.message)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return message


def _finish(turn: SampledTurn) -> str:
    if turn.is_cut_off:
        return "length"
    return "tool_calls" if turn.parsed.message.get("tool_calls") else "stop"


def _logprobs(body: ChatBody, turn: SampledTurn, reply: Reply) -> dict[str, Any] | None:
    return {"content": token_logprobs(turn, reply.chat), "refusal": None} if body.logprobs else None


def _head(body: ChatBody, reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": body.model,
        "slimrl": reply.note,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
    }
