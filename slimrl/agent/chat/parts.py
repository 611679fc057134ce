"""The parts of messages and tools, and whether they stand in a rendering.

A template may trim a text and write it as JSON or as XML, space JSON anew and escape it. So a text is looked for
trimmed, as it is and as JSON escapes it, and arguments value by value.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.agent.chat.template import Messages, read_arguments
from slimrl.agent.chat.thinking import CLOSE, OPEN

Values = Iterator[str | int | float | None]

_SAME_AS = {
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "function_call": "tool_calls",
    "refusal": "content",
}
"""Keys in which other tools write what a message says -> the key that chat templates read."""
_KEYS = frozenset(("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", *_SAME_AS))


TOOL = "the tool"
"""Beginning of the names of parts that are tools"""


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    """Name of the part in a message to the user"""
    values: tuple[str | int | float | None, ...]

    def stands_in(self, text: str) -> bool:
        return all(_stands(value, text) for value in self.values)


def said_parts(message: dict[str, Any], *, thinking: bool = True) -> list[Part]:
    """What an assistant's message says, or any other; without `thinking` that is left out."""
    thought, words = thinking_and_words(message)
    parts = [Part(name="its thinking", values=(thought,))] if thought and thinking else []
    if words:
        parts.append(Part(name="its words", values=(words,)))
    for number, call in enumerate(message.get("tool_calls") or ()):
        parts.append(Part(name=f"the name of tool_calls[{number}]", values=(call["function"]["name"],)))
        if values := tuple(_values(read_arguments(call))):
            parts.append(Part(name=f"the arguments of tool_calls[{number}]", values=values))
    for key, meant in _SAME_AS.items():
        if message.get(key) and not _repeats(message, key) and (values := tuple(_values(message[key]))):
            parts.append(Part(name=f"`{key}`, which is `{meant}` in slimrl", values=values))
    return parts


def _repeats(message: dict[str, Any], key: str) -> bool:
    """Whether a key says nothing but what the one does that slimrl reads: some servers send both."""
    return key in _SAME_AS and message.get(key) == message.get(_SAME_AS[key])


def thinking_and_words(message: dict[str, Any]) -> tuple[str, str]:
    """Trimmed; some files have the thinking of an answer at the beginning of its content, in tags.

    Raises:
        ValueError: one of them is no text.
    """
    thought, words = _text(message, "reasoning_content"), _text(message, "content")
    if message["role"] == "assistant" and words.lstrip().startswith(OPEN) and CLOSE in words:
        inside, _, words = words.lstrip().removeprefix(OPEN).partition(CLOSE)
        thought = f"{thought}\n{inside}" if thought else inside
    return thought.strip(), words.strip()


def tool_parts(schemas: Sequence[dict[str, Any]]) -> list[Part]:
    """What a model has to be told of each tool: its name, its description, and those of its parameters."""
    return [Part(name=f"{TOOL} {_name(schema)}", values=tuple(_schema_texts(schema))) for schema in schemas]


def _name(schema: dict[str, Any]) -> Any:
    return schema.get("function", schema).get("name")


def with_marker_words(messages: Messages) -> list[dict[str, Any]]:
    """A conversation of the same shape, with a word in place of each text that occurs nowhere else."""
    calls: dict[str, str] = {}
    names: dict[str, str] = {}
    return [_marked(message, f"{number}m", calls, names) for number, message in enumerate(messages)]


def _marked(message: dict[str, Any], place: str, calls: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
    """A message with marker words; `calls` and `names` take its calls' ids and tools to those in their place."""
    # Other keys may differ from line to line, such as a date, so that no two lines had the same shape.
    changed = {
        key: value
        for key, value in message.items()
        if (key in _KEYS and not _repeats(message, key)) or isinstance(value, bool)
    }
    for key in ("reasoning_content", *_SAME_AS):
        if changed.get(key):
            changed[key] = f"{key}{place}"
    thought, words = thinking_and_words({**message, "reasoning_content": None})
    if message.get("content"):
        changed["content"] = f"words{place}" if words else ""
        if thought:
            changed["content"] = f"{OPEN}\nthought{place}\n{CLOSE}\n\n{changed['content']}"
    if given := message.get("tool_calls"):
        changed["tool_calls"] = [
            _marked_call(call, f"{number}c{place}", calls, names) for number, call in enumerate(given)
        ]
    if call_id := _text(message, "tool_call_id"):
        changed["tool_call_id"] = calls.get(call_id, "0")
    if message["role"] == "tool" and (name := _text(message, "name")):
        changed["name"] = names.get(name, f"name{place}")
    return changed


def _marked_call(call: dict[str, Any], place: str, calls: dict[str, str], names: dict[str, str]) -> dict[str, Any]:
    name, call_id = call["function"]["name"], _text(call, "id")
    names[name] = f"called{place}"
    arguments = {f"key{place}": f"value{place}"} if read_arguments(call) else {}
    changed = {"type": "function", "function": {"name": names[name], "arguments": arguments}}
    if call_id:
        # Some templates write the id in place of the name, others ask for ids of one length.
        kept = call_id.replace(name, names[name]) if name in call_id else str(len(calls)).zfill(len(call_id))
        calls[call_id] = changed["id"] = kept
    return changed


def _text(value: dict[str, Any], key: str) -> str:
    """Raises ValueError if the key has something else."""
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"`{key}` must be a string")
    return text or ""


def _values(value: Any) -> Values:
    """All names and values in an argument."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _values(one)
    elif isinstance(value, list):
        for one in value:
            yield from _values(one)
    elif not isinstance(value, str) or value.strip():
        yield value


def _schema_texts(schema: Any) -> Values:
    """Names and descriptions in a JSON schema, with the names of parameters and the choices of their values."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schema_texts(one)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("name", "description") and isinstance(value, str) and value.strip():
            yield value
        elif key == "properties" and isinstance(value, dict):
            for name, one in value.items():
                yield name
                yield from _schema_texts(one)
        elif key == "enum":
            yield from _values(value)
        else:
            yield from _schema_texts(value)


def _stands(value: Any, text: str) -> bool:
    if not isinstance(value, str):
        return json.dumps(value) in text or str(value) in text
    trimmed = value.strip()
    if trimmed in text:
        return True
    # As JSON, as JSON without characters beyond ASCII, and as JSON within JSON.
    escaped = _inside(trimmed)
    return escaped in text or _inside(trimmed, ascii_only=True) in text or _inside(escaped) in text


def _inside(value: str, *, ascii_only: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ascii_only)[1:-1]
