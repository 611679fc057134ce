"""What reads tool calls in a model's text."""

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.config.agent_rules import HARMONY
from slimrl.config.import_path import resolve
from slimrl.config.package_fields import tool_call_parsers


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """One assistant turn, without its thinking."""

    content: str
    """Text outside the calls."""
    calls: list[ToolCall | MalformedCall]
    """Calls in the order of the text."""


@runtime_checkable
class Parser(Protocol):
    """The tool-call syntax of one family of models."""

    close_marker: str
    """The text that closes a call; a turn may be stopped at it. Empty if there is none."""

    def parse(self, text: str) -> ParsedTurn: ...


class NoCalls:
    """Parser for models without tools: whatever they write is their answer."""

    close_marker = ""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(content=text.strip(), calls=[])


_SPELT = re.compile(r"<(?:tool_calls?|tool_sep|arg_key|arg_value)(?::[^<>]+)?>")


def marker_tokens(reserved: Iterable[str]) -> tuple[str, ...]:
    """Those of a tokenizer's reserved tokens from which SGLang's parser of Hy3's calls takes its markers: they have a
    suffix there, such as `<tool_call:opensource>`, or none."""
    return tuple(text for text in reserved if _SPELT.fullmatch(text))


def make_parser(name: str, schemas: Sequence[dict[str, Any]], tokens: Sequence[str] = ()) -> Parser:
    """SGLang's parser of that name, `harmony`, or the result of calling the function or class at that import path.

    Args:
        schemas: of the tools, which SGLang's parsers read types and names from.
        tokens: `marker_tokens` of the model; without any, markers have no suffix.

    Raises:
        ValueError: there is no such parser, function or class, or it does not return a parser.
    """
    if name == HARMONY:
        from slimrl.agent.harmony_parser import HarmonyParser

        return HarmonyParser(schemas)
    if ":" not in name:
        if name not in tool_call_parsers():
            raise ValueError(
                f"{name}: the installed SGLang has no such parser; it has {', '.join(tool_call_parsers())}, "
                f"and slimrl has {HARMONY}"
            )
        from slimrl.agent.sglang_parser import SGLangParser  # its imports take a second

        return SGLangParser(name, schemas, tokens)
    make = resolve(name, classes=True)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{name}: must be callable without arguments: {error}") from error
    parser = make()
    if not isinstance(parser, Parser):
        raise ValueError(f"{name} returns {type(parser).__name__}; a parser has close_marker and parse(text)")
    return parser
