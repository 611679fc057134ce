"""Reads tool calls in what the model wrote. A malformed call is a value, not an exception: the model is told of it."""

import inspect
import json
import re
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from slimrl.config.schema import ParserName
from slimrl.data.import_path import resolve


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One well-formed call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MalformedCall:
    """Something that was meant as a call."""

    problem: str
    """Said to the model."""


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """One assistant turn."""

    content: str
    """The text outside the calls."""
    calls: list[ToolCall | MalformedCall]
    """In the order in which they were written."""


@runtime_checkable
class Parser(Protocol):
    """How one family of models writes tool calls."""

    close_marker: str
    """What closes a call; a turn may be stopped at it."""

    def parse(self, text: str) -> ParsedTurn: ...


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write."""

    close_marker = "</tool_call>"
    _call = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)

    def parse(self, text: str) -> ParsedTurn:
        calls = [self._read(match) for match in self._call.finditer(text)]
        content = self._call.sub("", text)
        if self.close_marker in content:
            content = content.replace(self.close_marker, "")
            calls.append(MalformedCall(problem="malformed tool call: nothing opened it"))
        return ParsedTurn(content=content.strip(), calls=calls)

    def _read(self, match: re.Match[str]) -> ToolCall | MalformedCall:
        if not match.group(0).endswith(self.close_marker):
            return MalformedCall(problem="malformed tool call: not closed")
        try:
            value = json.loads(match.group(1))
        except (json.JSONDecodeError, RecursionError):
            return MalformedCall(problem="malformed tool call: not JSON")
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return MalformedCall(problem="malformed tool call: no name")
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return MalformedCall(problem="malformed tool call: arguments are no object")
        return ToolCall(name=value["name"], arguments=arguments)


_PARSERS: dict[ParserName, type[Parser]] = {ParserName.hermes: HermesParser}


def make_parser(name: str) -> Parser:
    """The parser of that name, or what the function or class at that import path gives when it is called.

    Raises:
        ValueError: the path names nothing, or what makes no parser.
    """
    if ":" not in name:
        return _PARSERS[ParserName(name)]()
    make = resolve(name, classes=True)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{name}: it is called without arguments: {error}") from error
    parser = make()
    if not isinstance(parser, Parser):
        raise ValueError(f"{name} gives no parser but {type(parser).__name__}; one has close_marker and parse(text)")
    return parser
