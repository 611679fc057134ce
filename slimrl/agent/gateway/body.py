"""What the bodies of all three APIs have in common: fields that are known, and no others."""

from typing import Annotated, Any, Literal

import jsonschema
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from slimrl.agent.environment import Message
from slimrl.agent.gateway.errors import refused
from slimrl.data.jsonl import refuse_unwritable


class Strict(BaseModel):
    """An object of a request; a field that it does not name is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Loose(BaseModel):
    """An object that clients send back with whatever an answer had besides."""

    model_config = ConfigDict(extra="ignore", strict=True)


MAX_CHOICES = 128
"""Most answers to one request"""

Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Count = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1)]


class TextPart(Loose):
    """A part of a message. The policy reads text alone."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[TextPart]
Listed = Annotated[list[StopText], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Texts, or a single one"""
Unused = Any
"""A field that does not concern what the policy says, such as the user's name"""


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def function_schema(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates take it; raises ApiError if its parameters are no JSON schema."""
    try:
        jsonschema.Draft202012Validator.check_schema(parameters or {})
    except jsonschema.SchemaError as error:
        raise refused(f"tools: the parameters of {name} are no JSON schema: {error.message}") from error
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def call_of(call_id: str | None, name: str, arguments: Any, where: str) -> dict[str, Any]:
    """A call of an assistant's message; raises ApiError if its arguments are no object."""
    if not isinstance(arguments, dict):
        raise refused(f"{where}: the arguments of {name} are no JSON object")
    try:
        refuse_unwritable(arguments)
    except ValueError as error:
        raise refused(f"{where}: the arguments of {name}: {error}") from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(text: str, calls: list[dict[str, Any]], reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
