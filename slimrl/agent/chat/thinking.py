"""Thinking: what a model writes between `<think>` and `</think>` before its answer, as Qwen, GLM and DeepSeek do.

Hy3's tags have a suffix, as all its markers have: `<think:opensource>`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"

_SUFFIXED = re.compile(r"<think(:[^<>]+)>")


class Tags(NamedTuple):
    """The texts around thinking."""

    open: str
    close: str


PLAIN = Tags(OPEN, CLOSE)


def thinking_tags(reserved: Iterable[str]) -> Tags:
    """The tags of a model with these reserved tokens."""
    found = next(filter(None, map(_SUFFIXED.fullmatch, reserved)), None)
    return Tags(f"<think{found[1]}>", f"</think{found[1]}>") if found else PLAIN


@dataclass(frozen=True, kw_only=True)
class Thought:
    """The thinking and the answer of a turn."""

    thinking: str | None
    """Text of the thinking; None if the turn has none."""
    answer: str
    """Text outside of the thinking; empty if the thinking at the beginning is not closed."""
    closed: bool = True


def opens_thinking(header: str, tags: Tags = PLAIN) -> bool:
    """Whether the header of a turn leaves thinking open, so that the policy's first token is part of it."""
    return header.rfind(tags.open) > header.rfind(tags.close)


def split_thinking(text: str, *, opened: bool, tags: Tags = PLAIN) -> Thought:
    """Split a turn. Thinking that is opened after some words counts only if it is closed.

    Args:
        opened: the header before it has opened the thinking.
    """
    begun = text.lstrip()
    if not opened and begun.startswith(tags.open):
        opened, text = True, begun[len(tags.open) :]
    thoughts, words = [], []
    if opened:
        thought, closing, text = text.partition(tags.close)
        if not closing:
            return Thought(thinking=thought.strip(), answer="", closed=False)
        thoughts.append(thought)
        text = text.lstrip()
    place = 0
    while (start := text.find(tags.open, place)) >= 0 and (end := text.find(tags.close, start)) >= 0:
        words.append(text[place:start])
        thoughts.append(text[start + len(tags.open) : end])
        place = end + len(tags.close)
    thinking = "\n".join(thought.strip() for thought in thoughts) if thoughts else None
    return Thought(thinking=thinking, answer="".join(words) + text[place:])
