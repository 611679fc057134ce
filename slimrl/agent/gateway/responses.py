"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses

A request may name an earlier answer of its trajectory, or items of one, in the place of its messages.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, ValidationError

from slimrl.agent.environment import Message
from slimrl.agent.gateway.body import (
    Body,
    Content,
    Count,
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
from slimrl.agent.gateway.errors import openai_error, refused
from slimrl.agent.gateway.events import named_event
from slimrl.agent.gateway.fields import RESPONSES
from slimrl.agent.gateway.history import SampledTurn
from slimrl.agent.gateway.messages import canonical
from slimrl.agent.gateway.openai_body import Called, Function

PATH = "/responses"
error_body = openai_error
LOGPROBS = "message.output_text.logprobs"


class Words(Loose):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class Call(Called):
    type: Literal["function_call"]
    call_id: str | None = None


class Answered(Loose):
    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


class Reasoning(Loose):
    """The reasoning of an earlier turn, whose tokens the gateway has"""

    type: Literal["reasoning"]


class Reference(Loose):
    """A reference to an item of an earlier answer"""

    type: Literal["item_reference"]
    id: str


Item = Words | Call | Answered | Reasoning | Reference
ITEMS: dict[str, type[Item]] = {
    "message": Words,
    "function_call": Call,
    "function_call_output": Answered,
    "reasoning": Reasoning,
    "item_reference": Reference,
}


class Tool(Function):
    type: Literal["function"] = "function"


AnyTool = Annotated[Annotated[Tool, Tag("tool")] | Annotated[OtherTool, Tag("other")], own_tools("function", None)]


class ResponsesBody(Body):
    input: str | list[dict[str, Any]]
    previous_response_id: str | None = None
    instructions: str | None = None
    tools: list[AnyTool] = Field(default_factory=list)
    parallel_tool_calls: Any = True
    max_output_tokens: Count | None = None
    include: list[str] = Field(default_factory=list)
    text: Object = Object()
    metadata: dict[str, Any] = Field(default_factory=dict)


def read(value: Mapping[str, Any], replies: Mapping[str, Reply]) -> tuple[ResponsesBody, ChatRequest]:
    """
    Args:
        replies: of the trajectory so far, by their ids.

    Raises:
        ValidationError, ApiError: the body is refused.
    """
    body = ResponsesBody.model_validate(value)
    replaced, ignored = judged(body, RESPONSES)
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages += _before(body.previous_response_id, replies)
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input, replies)
    return body, ChatRequest(
        messages=canonical(messages),
        tools=[
            function_schema(one.name, one.description, one.parameters)
            for one in body.tools
            if body.shows_tools and isinstance(one, Tool)
        ],
        max_tokens=body.max_output_tokens,
        sampling=replaced,
        has_instructions=body.instructions is not None,
        ignored=ignored,
    )


def answer(body: ResponsesBody, reply: Reply) -> dict[str, Any]:
    (turn,) = reply.turns
    return _response(body, reply, turn, _items(reply, turn, logprobs=LOGPROBS in body.include), done=True)


def events(body: ResponsesBody, reply: Reply) -> Iterator[bytes]:
    """The answer as server-sent events."""
    (turn,) = reply.turns
    numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    begun = _response(body, reply, turn, [], done=False)
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    items = _items(reply, turn, logprobs=LOGPROBS in body.include)
    for index, item in enumerate(items):
        place = {"output_index": index, "item_id": item["id"]}
        match item["type"]:
            case "message":
                yield event(
                    "output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []}
                )
                yield from _text_events(event, place, item["content"][0])
            case "function_call":
                empty = {**item, "status": "in_progress", "arguments": ""}
                yield event("output_item.added", output_index=index, item=empty)
                yield event("function_call_arguments.delta", **place, delta=item["arguments"])
                yield event("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
            case _:
                yield event("output_item.added", output_index=index, item=item)
        yield event("output_item.done", output_index=index, item=item)
    ended = "incomplete" if turn.is_cut_off else "completed"
    yield event(ended, response=_response(body, reply, turn, items, done=True))


def _text_events(event: Any, place: dict[str, Any], part: dict[str, Any]) -> Iterator[bytes]:
    inside = {**place, "content_index": 0}
    yield event("content_part.added", **inside, part={**part, "text": "", "logprobs": []})
    yield event("output_text.delta", **inside, delta=part["text"], logprobs=part["logprobs"])
    yield event("output_text.done", **inside, text=part["text"], logprobs=part["logprobs"])
    yield event("content_part.done", **inside, part=part)


def _before(name: str | None, replies: Mapping[str, Reply]) -> list[Message]:
    """The conversation up to an earlier answer, without the instructions that its request had."""
    if name is None:
        return []
    reply = replies.get(name.removeprefix("resp_"))
    if reply is None:
        raise refused(f"previous_response_id: this trajectory has no response {name}", "previous_response_not_found")
    messages = reply.turns[0].messages
    return messages[1:] if reply.has_instructions else messages


def _referred(item_id: str, where: str, replies: Mapping[str, Reply]) -> dict[str, Any]:
    """The item of an earlier answer."""
    reply = replies.get(item_id.partition("_")[2].partition("_")[0])
    for item in _items(reply, reply.turns[0], logprobs=False) if reply else ():
        if item["id"] == item_id:
            return item
    raise refused(f"{where}: this trajectory has no item {item_id}. Send the item.")


def _messages(items: list[dict[str, Any]], replies: Mapping[str, Reply]) -> list[Message]:
    """The conversation; an assistant's words and the calls after them are one message."""
    messages: list[Message] = []
    for number, value in enumerate(items):
        where = f"input[{number}]"
        item = _item(value, where)
        if isinstance(item, Reference):
            item = _item(_referred(item.id, where, replies), where)
        match item:
            case Words(role="assistant"):
                messages.append(assistant_message(text_of(item.content), []))
            case Words():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text_of(item.content)})
            case Call():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append(assistant_message("", []))
                call = call_of(item.call_id, item.name, item.parsed(where), where)
                messages[-1].setdefault("tool_calls", []).append(call)
            case Answered():
                messages.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id})
    return messages


def _item(value: dict[str, Any], where: str) -> Item:
    kind = value.get("type")
    if kind is None:
        kind = "item_reference" if "id" in value and value.keys() <= {"type", "id"} else "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise refused(f"{where}: items of type {kind!r} are not supported", "unsupported_parameter")
    try:
        return ITEMS[kind].model_validate({**value, "type": kind})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise refused(f"{'.'.join([where, *map(str, problem['loc'])])}: {problem['msg']}") from error


def _items(reply: Reply, turn: SampledTurn, *, logprobs: bool) -> list[dict[str, Any]]:
    message, items = turn.parsed.message, list[dict[str, Any]]()
    calls = message.get("tool_calls", [])
    status = "incomplete" if turn.is_cut_off else "completed"
    if turn.parsed.reasoning:
        thought = {"type": "reasoning_text", "text": turn.parsed.reasoning}
        items.append({"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": [thought]})
    if message["content"] or not calls:
        listed = token_logprobs(turn, reply.chat) if logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": listed}
        items.append(
            {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    for number, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "id": f"fc_{reply.id}_{number}",
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": json.dumps(function["arguments"]),
                "status": "completed",
            }
        )
    return items


def _response(
    body: ResponsesBody, reply: Reply, turn: SampledTurn, items: list[dict[str, Any]], *, done: bool
) -> dict[str, Any]:
    cut_off = done and turn.is_cut_off
    status = "in_progress" if not done else "incomplete" if cut_off else "completed"
    sampled = reply.num_sampled_tokens
    usage = {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + sampled,
    }
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "instructions": body.instructions,
        "model": body.model,
        "output": items,
        "parallel_tool_calls": body.parallel_tool_calls,
        "temperature": reply.sampling["temperature"],
        "top_p": reply.sampling["top_p"],
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": reply.sampling["max_tokens"],
        "tool_choice": body.tool_choice,
        "tools": [tool.model_dump() for tool in body.tools if isinstance(tool, Tool)],
        "metadata": body.metadata,
        "usage": usage if done else None,
        "slimrl": reply.note,
    }
