"""Prompt files and conversation files (JSONL or Parquet), and the order in which training goes through them.

A prompt line has `label`, and `messages` (a list of {"role", "content"}) or `prompt` (the text of one user message, or
such a list); `id` and `metadata` are optional. A conversation line has `messages` with at least one assistant message,
whose `tool_calls` are {"function": {"name", "arguments"}}; `id`, `metadata` and `tools` (JSON schemas) are optional.
Null means that the key is not there, except for `label`. Other keys are refused, since they are usually misspellings,
unless the recipe names the file's columns (columns.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimrl.base.jsonl import data_stem
from slimrl.base.rows import WrongFileKind
from slimrl.base.seeds import derive_seed
from slimrl.base.strict_json import refuse_no_json
from slimrl.config.data_rules import CONVERSATION_KEYS, PROMPT_KEYS
from slimrl.data.columns import read_rows, rename_columns
from slimrl.data.prompt import Prompt

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(kw_only=True)
class Conversation:
    """One line of a conversation file."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas shown to the model; None if the line has no `tools`."""
    source: str = ""
    """Place of the conversation, `file:line`, for errors."""


def read_prompts(path: Path, keys: Mapping[str, str] | None = None) -> list[Prompt]:
    """All prompts of a file, in order.

    Args:
        keys: the file's columns by our names, see `rename_columns`; None if it has our names.

    Raises:
        ValueError: the file is missing or empty, an id occurs twice, or lines are broken; names every broken line, or
            only the first if it shows that this is a conversation file.
    """
    seen: dict[str, int] = {}

    def parse(row: dict[str, Any], number: int) -> Prompt:
        value = _given(rename_columns(row, keys or {}))
        if "label" not in value and _has_answer(value):
            raise WrongFileKind("this is a conversation file, for `slimrl sft`; a line of a prompt file has a `label`")
        _refuse_unknown(value, PROMPT_KEYS)
        if ("prompt" in value) == ("messages" in value):
            raise ValueError("exactly one of `prompt` and `messages` is needed")
        if "label" not in value:
            raise ValueError("`label` is missing")
        messages, metadata = _prompt_messages(value), _metadata(value)
        _refuse_no_json(value["label"], metadata)
        prompt_id = _line_id(value, path, number, seen)
        return Prompt(
            prompt_id=prompt_id,
            messages=messages,
            label=value["label"],
            metadata=metadata,
            source=f"{path}:{number}",
        )

    return read_rows(path, parse)


def read_conversations(path: Path, keys: Mapping[str, str] | None = None) -> list[Conversation]:
    """All conversations of a file, in order; `keys` as of read_prompts.

    Raises:
        ValueError: as read_prompts.
    """
    seen: dict[str, int] = {}

    def parse(row: dict[str, Any], number: int) -> Conversation:
        value = _given(rename_columns(row, keys or {}))
        if "label" in value and ("prompt" in value or not _has_answer(value)):
            raise WrongFileKind(
                "this is a prompt file, for `slimrl train`; a line of a conversation file has `messages` with at least "
                "one assistant message, and no `label`"
            )
        _refuse_unknown(value, CONVERSATION_KEYS)
        if "messages" not in value:
            raise ValueError("`messages` is missing")
        messages = _messages(value["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("`messages` has no assistant message to learn from")
        tools = value.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError("`tools` must be a list of JSON schemas")
        _line_id(value, path, number, seen)
        return Conversation(messages=messages, tools=tools or None, source=f"{path}:{number}")

    return read_rows(path, parse)


class Sampler[T]:
    """Iterates over items epoch after epoch, in an order that depends on the seed and the epoch alone.

    Its whole state is `epoch` and `index`, so a resumed run continues with the next item.
    """

    def __init__(self, items: Sequence[T], *, seed: int, shuffle: bool) -> None:
        if not items:
            raise ValueError("a sampler needs at least one item")
        self._items = items
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._index = 0
        self._order = self._epoch_order(0)
        self._left_out: frozenset[int] = frozenset()

    def leave_out(self, is_out: Callable[[T], bool]) -> None:
        """Skip such items from now on, whose places in the order stay.

        Raises:
            ValueError: no item would be left.
        """
        self._left_out = frozenset(number for number, item in enumerate(self._items) if is_out(item))
        if len(self._left_out) == len(self._items):
            raise ValueError(f"all {len(self._items)} items are left out")

    def take(self, count: int) -> list[T]:
        """The next `count` items, across the ends of epochs."""
        taken: list[T] = []
        while len(taken) < count:
            if self._index == len(self._items):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
            number = int(self._order[self._index])
            self._index += 1
            if number not in self._left_out:
                taken.append(self._items[number])
        return taken

    def state(self) -> dict[str, int]:
        """State for `restore`: the epoch, the number of items taken or skipped in it, and the number of items."""
        return {"epoch": self._epoch, "index": self._index, "num_items": len(self._items)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved `state`.

        Raises:
            ValueError: the state is for another number of items, or of a Mixture.
        """
        if "num_items" not in state:
            raise ValueError("the saved position is in files with data.weights, of which there are none now")
        if state["num_items"] != len(self._items):
            raise ValueError(
                f"the saved position is in data with {state['num_items']} items, but there are {len(self._items)} now"
            )
        self._epoch, self._index = state["epoch"], state["index"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._items))
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(len(self._items))


def _given(value: dict[str, Any]) -> dict[str, Any]:
    """The row without keys that are null; a label may be null."""
    return {key: one for key, one in value.items() if one is not None or key == "label"}


def _prompt_messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    name = "prompt" if "prompt" in value else "messages"
    given = value[name]
    if name == "prompt" and not isinstance(given, list):
        if not isinstance(given, str) or not given:
            raise ValueError("`prompt` must be a non-empty string or a list of messages")
        return [{"role": "user", "content": given}]
    messages = _messages(given, name)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"`{name}` ends with an assistant message; nothing is left to generate")
    return messages


def _has_answer(value: dict[str, Any]) -> bool:
    """Whether the last message is the assistant's, unlike in a prompt."""
    messages = value.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _refuse_unknown(value: dict[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(value.keys() - set(known))
    if unknown:
        said = f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        raise ValueError(f"{said}. data.keys and data.eval_keys name the columns of other files.")


def _line_id(value: dict[str, Any], path: Path, number: int, seen: dict[str, int]) -> str:
    line_id = value.get("id", f"{data_stem(path)}:{number}")
    if not isinstance(line_id, str) or not line_id:
        raise ValueError("`id` must be a non-empty string")
    if line_id in seen:
        raise ValueError(f"id {line_id} is also the id of line {seen[line_id]}")
    seen[line_id] = number
    return line_id


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    metadata = value.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` must be an object")
    return metadata


def _refuse_no_json(label: Any, metadata: dict[str, Any]) -> None:
    """Raises ValueError for what only a Parquet file may hold."""
    try:
        refuse_no_json(label, "label")
        refuse_no_json(metadata, "metadata")
    except ValueError as error:
        advice = "write the column as text, leave it out, or name the column of `metadata` in data.keys"
        raise ValueError(f"{error}; {advice}") from error


def _messages(value: Any, name: str = "messages") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{name}` must be a non-empty list")
    for position, message in enumerate(value):
        where = f"{name}[{position}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be an object")
        if message.get("role") not in _ROLES:
            raise ValueError(f"{where}.role is {message.get('role')!r}; known are {', '.join(_ROLES)}")
        _check_content(message, where)
    # Null means that the key is not there; a message with `tool_calls: null` has none.
    return [{key: one for key, one in message.items() if one is not None or key == "content"} for message in value]


def _check_content(message: dict[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if message["role"] != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls must be a list, in an assistant message")
        for number, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"{where}.tool_calls[{number}].function.name is missing")
            if not isinstance(function.get("arguments"), dict | str):
                raise ValueError(f"{where}.tool_calls[{number}].function.arguments must be an object or its JSON text")
    content = message.get("content")
    if not isinstance(content, str) and not (calls and content is None):
        raise ValueError(f"{where}.content must be a string")
