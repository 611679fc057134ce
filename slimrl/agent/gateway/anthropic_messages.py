"""Anthropic's messages: https://docs.claude.com/en/api/messages"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from slimrl.agent.environment import Message, error_text
from slimrl.agent.gateway.body import (
    Body,
    Content,
    Count,
    Loose,
    Object,
    OtherTool,
    StopText,
    TextPart,
    assistant_message,
    call_of,
    function_schema,
    judged,
    own_tools,
    text_of,
)
from slimrl.agent.gateway.chat_request import ChatRequest, Reply
from slimrl.agent.gateway.errors import anthropic_error, refused
from slimrl.agent.gateway.events import named_event
from slimrl.agent.gateway.fields import ANTHROPIC_MESSAGES
from slimrl.agent.gateway.history import SampledTurn
from slimrl.agent.gateway.messages import canonical

PATH = "/messages"
COUNT_PATH = "/messages/count_tokens"
error_body = anthropic_error


class Thinking(Loose):
    """The thinking of an earlier turn, whose tokens the gateway has"""

    type: Literal["thinking", "redacted_thinking"]


class ToolUse(Loose):
    type: Literal["tool_use"]
    id: str | None = None
    name: str
    input: dict[str, Any]


class ToolResult(Loose):
    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Content | None = None
    is_error: bool | None = None


class Turn(Object):
    role: Literal["system", "user", "assistant"]
    content: str | list[Annotated[TextPart | ToolUse | ToolResult | Thinking, Field(discriminator="type")]]


class Tool(Object):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


AnyTool = Annotated[Annotated[Tool, Tag("tool")] | Annotated[OtherTool, Tag("other")], own_tools("custom", None)]


class MessagesBody(Body):
    messages: list[Turn]
    max_tokens: Count
    system: Content | None = None
    tools: list[AnyTool] = Field(default_factory=list)
    stop_sequences: list[StopText] = Field(default_factory=list)
    thinking: dict[str, Any] | None = None
    output_config: Object = Object()

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.get("type") != "disabled"


def read(value: Mapping[str, Any], replies: Mapping[str, Reply]) -> tuple[MessagesBody, ChatRequest]:
    """Raises ValidationError or ApiError."""
    body = MessagesBody.model_validate(value)
    replaced, ignored = judged(body, ANTHROPIC_MESSAGES)
    messages = [] if body.system is None else [{"role": "system", "content": text_of(body.system)}]
    for number, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{number}]")
    return body, ChatRequest(
        messages=canonical(messages),
        tools=[
            function_schema(one.name, one.description, one.input_schema)
            for one in body.tools
            if body.shows_tools and isinstance(one, Tool)
        ],
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
        sampling=replaced,
        ignored=ignored,
    )


def answer(body: MessagesBody, reply: Reply) -> dict[str, Any]:
    (turn,) = reply.turns
    return {**_head(body, reply), "content": _blocks(body, turn), **_ending(turn), "usage": _usage(reply)}


def events(body: MessagesBody, reply: Reply) -> Iterator[bytes]:
    """The answer as server-sent events."""
    (turn,) = reply.turns
    usage = _usage(reply)
    begun = {**_head(body, reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield named_event({"type": "message_start", "message": begun})
    for index, block in enumerate(_blocks(body, turn)):
        empty, deltas = _in_deltas(block)
        yield named_event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield named_event({"type": "content_block_stop", "index": index})
    yield named_event({"type": "message_delta", "delta": _ending(turn), "usage": usage})
    yield named_event({"type": "message_stop"})


def _messages(turn: Turn, where: str) -> list[Message]:
    """The messages of a turn: those of tools first, then the words."""
    blocks = [TextPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    text = "".join(block.text for block in blocks if isinstance(block, TextPart))
    uses = [block for block in blocks if isinstance(block, ToolUse)]
    results = [block for block in blocks if isinstance(block, ToolResult)]
    if results and turn.role != "user":
        raise refused(f"{where}: a tool_result is the user's")
    if uses and turn.role != "assistant":
        raise refused(f"{where}: a tool_use is the assistant's")
    if turn.role == "assistant":
        return [assistant_message(text, [call_of(one.id, one.name, one.input, where) for one in uses])]
    if turn.role == "system":
        return [{"role": "system", "content": text}]
    told: list[Message] = [
        {"role": "tool", "tool_call_id": one.tool_use_id, "content": _result_text(one)} for one in results
    ]
    if any(isinstance(block, TextPart) for block in blocks):
        told.append({"role": "user", "content": text})
    return told


def _result_text(result: ToolResult) -> str:
    text = text_of(result.content)
    return error_text(text) if result.is_error else text


def _blocks(body: MessagesBody, turn: SampledTurn) -> list[dict[str, Any]]:
    message, blocks = turn.parsed.message, []
    if body.shows_thinking and turn.parsed.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": turn.parsed.reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks or [{"type": "text", "text": ""}]


def _in_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    match block["type"]:
        case "tool_use":
            text = json.dumps(block["input"])
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _ending(turn: SampledTurn) -> dict[str, Any]:
    if turn.is_cut_off:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.parsed.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if turn.stop_text else "end_turn", "stop_sequence": turn.stop_text}


def _head(body: MessagesBody, reply: Reply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "slimrl": reply.note,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    """Tokens; what the engine had cached is counted apart, as this API does."""
    cached = reply.num_cached_tokens
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.num_sampled_tokens,
    }
