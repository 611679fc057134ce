"""Prompt files and conversation files (JSONL), and the order in which training goes through them.

A prompt line has `messages` (a list of {"role", "content"}) or `prompt` (the text of one user message), `label`,
and if it likes `id` and `metadata`. A conversation line has `messages` with at least one assistant message, whose
`tool_calls` are {"function": {"name", "arguments"}}, and if it likes `id` and `tools` (JSON schemas).
Other keys are refused, since they are most often a misspelling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from slimrl.data.jsonl import OtherKind, read_jsonl
from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt

T = TypeVar("T")

_PROMPT_KEYS = {"id", "prompt", "messages", "label", "metadata"}
_CONVERSATION_KEYS = {"id", "messages", "tools", "metadata"}
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(kw_only=True)
class Conversation:
    """One line of a conversation file."""

    conversation_id: str
    """`<file stem>:<line number>`, or the line's own `id`."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas shown to the model; None where the line has no `tools`."""
    source: str = ""
    """`file:line`, for errors."""


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, in order.

    Raises:
        ValueError: the file is missing or empty, an id occurs twice, or lines are broken; it names every broken line,
            or the first alone where that shows a file of the other kind.
    """
    seen: dict[str, int] = {}

    def parse(value: dict[str, Any], number: int) -> Prompt:
        if "label" not in value and _has_answer(value):
            raise OtherKind("this is a conversation file, for `slimrl sft`; a line of a prompt file has a `label`")
        _refuse_unknown(value, _PROMPT_KEYS)
        if ("prompt" in value) == ("messages" in value):
            raise ValueError("exactly one of `prompt` and `messages` is needed")
        if "label" not in value:
            raise ValueError("`label` is missing")
        if "prompt" in value:
            if not isinstance(value["prompt"], str) or not value["prompt"]:
                raise ValueError("`prompt` must be a text that is not empty")
            messages = [{"role": "user", "content": value["prompt"]}]
        else:
            messages = _messages(value["messages"])
            if messages[-1]["role"] == "assistant":
                raise ValueError("`messages` ends with an assistant message; nothing is left to generate")
        prompt_id = _line_id(value, path, number, seen)
        return Prompt(
            prompt_id=prompt_id,
            messages=messages,
            label=value["label"],
            metadata=_metadata(value),
            source=f"{path}:{number}",
        )

    return read_jsonl(path, parse)


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a file, in order.

    Raises:
        ValueError: as read_prompts.
    """
    seen: dict[str, int] = {}

    def parse(value: dict[str, Any], number: int) -> Conversation:
        if "label" in value and ("prompt" in value or not _has_answer(value)):
            raise OtherKind(
                "this is a prompt file, for `slimrl train`; a line of a conversation file has `messages` with at least "
                "one assistant message, and no `label`"
            )
        _refuse_unknown(value, _CONVERSATION_KEYS)
        if "messages" not in value:
            raise ValueError("`messages` is missing")
        messages = _messages(value["messages"])
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("`messages` has no assistant message to learn from")
        tools = value.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError("`tools` must be a list of JSON schemas")
        return Conversation(
            conversation_id=_line_id(value, path, number, seen),
            messages=messages,
            tools=tools or None,
            source=f"{path}:{number}",
        )

    return read_jsonl(path, parse)


class Sampler(Generic[T]):
    """Goes through items again and again, in an order that the seed and the epoch alone decide.

    Its whole state is `epoch` and `index`, so a resumed run continues with the item that would have come next.
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

    def take(self, count: int) -> list[T]:
        """The next `count` items; an epoch's end is not a stop."""
        taken: list[T] = []
        for _ in range(count):
            if self._index == len(self._items):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._epoch_order(self._epoch)
            taken.append(self._items[self._order[self._index]])
            self._index += 1
        return taken

    def state(self) -> dict[str, int]:
        """What `restore` takes: the epoch, how many of its items were taken, and how many there are."""
        return {"epoch": self._epoch, "index": self._index, "num_items": len(self._items)}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from `state`.

        Raises:
            ValueError: the state is of another number of items, so its position means nothing here.
        """
        if state["num_items"] != len(self._items):
            raise ValueError(
                f"the saved data position is in a set of {state['num_items']} items, this one has {len(self._items)}"
            )
        self._epoch, self._index = state["epoch"], state["index"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._items))
        return np.random.default_rng(derive_seed(self._seed, "epoch", epoch)).permutation(len(self._items))


def _has_answer(value: dict[str, Any]) -> bool:
    """Whether the messages end with the assistant's, which no prompt's do."""
    messages = value.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _refuse_unknown(value: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(value.keys() - known)
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _line_id(value: dict[str, Any], path: Path, number: int, seen: dict[str, int]) -> str:
    line_id = value.get("id", f"{path.stem}:{number}")
    if not isinstance(line_id, str) or not line_id:
        raise ValueError("`id` must be a text that is not empty")
    if line_id in seen:
        raise ValueError(f"id {line_id} is that of line {seen[line_id]} too")
    seen[line_id] = number
    return line_id


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    metadata = value.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` must be an object")
    return metadata


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError("`messages` must be a list that is not empty")
    for position, message in enumerate(value):
        where = f"messages[{position}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be an object")
        if message.get("role") not in _ROLES:
            raise ValueError(f"{where}.role is {message.get('role')!r}; known are {', '.join(_ROLES)}")
        _check_content(message, where)
    return value


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
        raise ValueError(f"{where}.content must be a text")
