"""Whether calls fit the schemas of their tools: those that a policy samples, and those that conversations teach."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
from referencing import Registry

from slimrl.agent.schema_draft import draft_of, without_unread_patterns

WRAPPED = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


class CallSchemas:
    """The schemas of the arguments of some tools.

    Args:
        schemas: `{"type": "function", "function": {"name", "parameters"}}` of each tool.
        closed: refuse also arguments that the `properties` of a tool's parameters lack, which JSON Schema allows but
            no function takes.

    Raises:
        ValueError: the parameters of a tool are no JSON schema.
    """

    def __init__(self, schemas: Sequence[Mapping[str, Any]], *, closed: bool = False) -> None:
        self._parameters = {}
        for function in (schema["function"] for schema in schemas):
            parameters = function.get("parameters") or {}
            try:
                draft = draft_of(parameters)
            except ValueError as error:
                raise ValueError(f"the parameters of {function['name']} are no JSON schema: {error}") from error
            if closed and "properties" in parameters:
                parameters = {"unevaluatedProperties": False, **parameters}
            # With a registry of its own, since by default it downloads what a schema refers to.
            self._parameters[function["name"]] = draft(without_unread_patterns(parameters), registry=Registry())

    def unknown_tool(self, name: str) -> str | None:
        """The problem if there is no such tool."""
        if name in self._parameters:
            return None
        return f"unknown tool {name}; known: {', '.join(self._parameters) or 'none'}"

    def wrong_arguments(self, name: str, arguments: Any) -> str | None:
        """Why a known tool refuses arguments; None if it takes them. May raise RecursionError."""
        error = jsonschema.exceptions.best_match(self._parameters[name].iter_errors(arguments))
        if error is not None:
            where = ".".join(map(str, error.absolute_path)) or "arguments"
            return f"malformed tool call: {where}: {error.message}"
        return None if isinstance(arguments, dict) else "malformed tool call: arguments are no object"


def refuse_wrong_calls(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse a conversation with calls that its own tools would refuse; one without tools is accepted.

    Raises:
        ValueError: a call does not fit, or a tool is not of the form WRAPPED.
    """
    if not tools:
        return
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ValueError(f"tools[{number}] must be {WRAPPED}")
        if not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{number}].function.name is missing; a tool is {WRAPPED}")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(f"tools[{number}].function.parameters must be a JSON schema, which is an object")
    schemas = CallSchemas(tools, closed=True)
    for place, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            where, name = f"messages[{place}].tool_calls[{number}]", call["function"]["name"]
            if problem := schemas.unknown_tool(name):
                raise ValueError(f"{where}: {problem}. Add its schema to `tools`, or take the call out.")
            if problem := schemas.wrong_arguments(name, _parsed(call["function"]["arguments"], where)):
                raise ValueError(f"{where} of {name}: {problem}. Mend the call, or the schema of {name} in `tools`.")


def _parsed(arguments: Any, where: str) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}.function.arguments is a text that is not JSON: {error}") from error
