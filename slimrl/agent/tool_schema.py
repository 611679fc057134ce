"""The JSON schema of a function that is a tool, as chat templates take it.

transformers writes it from annotations and docstring, in the form that models are trained with. It knows no types with
parts of their own (enumerations, dataclasses, TypedDicts, pydantic models), for which pydantic writes the schema.
It is imported with the first schema: it takes several times as long as all that a task imports (slimrl.api).
"""

import dataclasses
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Any

import pydantic

from slimrl.agent.schema_draft import unread_patterns

REFERENCE = "#/$defs/"


def tool_schema(function: Callable[..., Any], hidden: Collection[str]) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "description", "parameters"}}.

    Args:
        hidden: parameters that the model does not give.

    Raises:
        ValueError: annotations and docstring are not enough for a schema, a type refers to itself, or has a pattern
            that Python's `re` cannot read.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(_without(function, hidden))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"tool {function.__module__}:{function.__qualname__}: {error}") from error
    schema["function"].pop("return", None)  # not part of the schema that models are trained with
    properties = schema["function"]["parameters"]["properties"]
    for name, hint in typing.get_type_hints(function).items():
        if name in properties and _has_parts(hint):
            described = pydantic.TypeAdapter(hint).json_schema()
            whole = _inlined(described, described.get("$defs", {}), ())
            properties[name] = {**whole, "description": properties[name]["description"]}
    if pattern := next(unread_patterns(schema["function"]["parameters"]), None):
        raise ValueError(f"the pattern {pattern!r} cannot be judged: Python's `re` cannot read it")
    return schema


def _has_parts(hint: Any) -> bool:
    """Whether a type, or one inside it, has parts of its own."""
    if isinstance(hint, type) and not typing.get_origin(hint):
        own = dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)
        return own or issubclass(hint, enum.Enum | pydantic.BaseModel)
    return any(map(_has_parts, typing.get_args(hint)))


def _inlined(schema: Any, definitions: dict[str, Any], above: tuple[str, ...]) -> Any:
    """The schema with each definition in its place, without titles."""
    if isinstance(schema, list):
        return [_inlined(one, definitions, above) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REFERENCE)
        if name in above:
            raise ValueError(f"the type {name} refers to itself, which no schema of a tool can say")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[name], definitions, (*above, name)), **rest}
    return {
        # Names of properties stand where keywords do not.
        key: {name: _inlined(one, definitions, above) for name, one in value.items()}
        if key == "properties"
        else _inlined(value, definitions, above)
        for key, value in schema.items()
        if key not in ("title", "$defs")
    }


def _without(function: Callable[..., Any], hidden: Collection[str]) -> Callable[..., Any]:
    """The function as it looks without these parameters."""
    if not hidden:
        return function

    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("only looked at")

    given = inspect.signature(function)
    kept = [each for name, each in given.parameters.items() if name not in hidden]
    shown.__signature__ = given.replace(parameters=kept)  # type: ignore[attr-defined]
    shown.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name not in hidden}
    del shown.__wrapped__
    return shown
