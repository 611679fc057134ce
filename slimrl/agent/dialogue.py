"""How a policy talks: its chat format, the tools that it is shown, the parser of its calls, and where a turn ends."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.parsers import Parser

MakeParser = Callable[[Sequence[dict[str, Any]]], Parser]
"""The parser of the model's calls to tools with these schemas."""

MOST_KEPT = 1000
"""Largest number of dialogues that a process keeps: agents may bring other tools for each trajectory."""


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    chat: ChatFormat
    schemas: Sequence[dict[str, Any]]
    """JSON schemas of the tools"""
    parser: Parser
    stop_token_ids: tuple[int, ...]
    """Tokens at which the engine stops."""
    call_ends: frozenset[int]
    """Tokens after which a turn with calls can be answered; one of words alone can be after `chat.answer_ends`; the
    other stop tokens end the whole text."""


class Dialogues:
    """The dialogues of one policy, one for each set of tools.

    Args:
        stop_at_call: with tools, end a turn at its first closed call.
    """

    def __init__(self, chat: ChatFormat, make_parser: MakeParser, *, stop_at_call: bool) -> None:
        self.chat, self._make_parser, self._stop_at_call = chat, make_parser, stop_at_call
        self._made: dict[str, Dialogue] = {}
        self._lock = threading.Lock()

    def of(self, schemas: Sequence[dict[str, Any]]) -> Dialogue:
        """The dialogue with these tools; may be called from several threads.

        Args:
            schemas: of the tools.

        Raises:
            ValueError: there are tools, and the chat template writes none of the tokens that end a turn after a call,
                or no parser reads its calls.
        """
        key = json.dumps(schemas, sort_keys=True)
        made = self._made.get(key)
        if made is None:
            made = make_dialogue(self.chat, schemas, self._make_parser(schemas), stop_at_call=self._stop_at_call)
            with self._lock:
                if len(self._made) >= MOST_KEPT:
                    del self._made[next(iter(self._made))]
                self._made[key] = made
        return made


def make_dialogue(
    chat: ChatFormat, schemas: Sequence[dict[str, Any]], parser: Parser, *, stop_at_call: bool
) -> Dialogue:
    """A turn ends at the model's own stop tokens and, with tools, at the marker that closes a call if it is one token.

    Raises:
        ValueError: there are tools, and the chat template does not show them, or writes none of these tokens after a
            call.
    """
    stops, call_ends = chat.stop_token_ids, frozenset[int]()
    if schemas:
        chat.require_shown(schemas)
        call_ends = chat.call_ends
        close = chat.token_id(parser.close_marker) if stop_at_call and parser.close_marker else None
        if close is not None and close not in stops:
            stops, call_ends = (*stops, close), call_ends | {close}
        if not call_ends:
            texts = ", ".join(repr(chat.template.decode([token])) for token in stops)
            raise ValueError(f"the chat template writes none of the tokens that end a turn after a tool call: {texts}")
    return Dialogue(chat=chat, schemas=schemas, parser=parser, stop_token_ids=stops, call_ends=call_ends)
