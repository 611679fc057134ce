"""What the bodies of all three APIs have in common, and what becomes of fields that change no answer."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from slimrl.agent.environment import Message
from slimrl.agent.gateway.errors import refused
from slimrl.agent.gateway.fields import Field as Judged
from slimrl.agent.gateway.fields import Verdict
from slimrl.agent.schema_draft import draft_of
from slimrl.base.jsonl import refuse_unwritable


class Object(BaseModel):
    """An object of a request. A field that is null is absent; one that is not named here is left to `judged`."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


class Loose(Object):
    """An object that clients send back with whatever an answer had besides."""

    model_config = ConfigDict(extra="ignore", strict=True)


class OtherTool(Loose):
    """A tool that the policy cannot be shown, such as a search that the company's servers run"""

    type: str


def own_tools(*kinds: str | None) -> Discriminator:
    """Discriminator of a union: `tool` for a tool of one of these types, else `other`."""
    return Discriminator(lambda value: "tool" if not isinstance(value, dict) or value.get("type") in kinds else "other")


class Body(Object):
    model: str
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    stream: bool = False

    @property
    def shows_tools(self) -> bool:
        kind = self.tool_choice.get("type") if isinstance(self.tool_choice, dict) else self.tool_choice
        return bool(kind != "none")


MAX_CHOICES = 128
"""Largest number of answers (`n`) to one request"""

Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
Count = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1)]


class TextPart(Loose):
    """A part of a message. The policy reads text alone."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[TextPart]
Listed = Annotated[list[StopText], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of texts, or a single text, which becomes a list of one"""


UNKNOWN = "the gateway does not know it"
NOT_SHOWN = "the policy is shown functions alone"


def judged(body: Body, table: Mapping[str, Judged]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of fields that the run's settings replace, and the reasons why other fields are ignored; each by the
    field's path.

    Raises:
        ApiError: a field is refused.
    """
    replaced, ignored = dict[str, Any](), dict[str, str]()
    for path, value, is_known in _given(body):
        field = table.get(path)
        if field is None:
            ignored |= {} if is_known else {path: UNKNOWN}
        elif field.is_absent(value):
            continue
        elif field.verdict is Verdict.refused:
            raise refused(f"{path}: {field.reason}", "unsupported_parameter")
        elif field.verdict is Verdict.runs:
            replaced[path] = value
        elif field.verdict is Verdict.ignored:
            ignored[path] = field.reason
    others = {one.type for one in body.tools if isinstance(one, OtherTool)}
    return replaced, ignored | {f"tools[] of type {kind}": NOT_SHOWN for kind in sorted(others)}


def _given(value: Any, path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """The path and value of each field that a request has, and whether a model reads it."""
    if isinstance(value, list):
        for one in value:
            yield from _given(one, f"{path}[]")
    elif isinstance(value, Object):
        prefix = f"{path}." if path else ""
        for name in filter(value.model_fields_set.__contains__, type(value).model_fields):
            yield f"{prefix}{name}", getattr(value, name), True
            yield from _given(getattr(value, name), f"{prefix}{name}")
        for name, one in (value.model_extra or {}).items():
            yield f"{prefix}{name}", one, False


def text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def function_schema(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool as chat templates take it; raises ApiError if its parameters are no JSON schema."""
    try:
        draft_of(parameters or {})
    except ValueError as error:
        raise refused(f"tools: the parameters of {name} are no JSON schema: {error}") from error
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
