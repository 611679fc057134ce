"""Thinking: what a model writes between `<think>` and `</think>` before its answer, as Qwen, GLM and DeepSeek do."""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True)
class Thought:
    """The thinking and the answer of a turn."""

    thinking: str | None
    """Text of the thinking; None if the turn has none."""
    answer: str
    """Text outside of the thinking; empty if the thinking at the beginning is not closed."""
    closed: bool = True


def opens_thinking(header: str) -> bool:
    """Whether the header of a turn leaves thinking open, so that the policy's first token is part of it."""
    return header.rfind(OPEN) > header.rfind(CLOSE)


def split_thinking(text: str, *, opened: bool) -> Thought:
    """Split a turn. Thinking that is opened after some words counts only if it is closed.

    Args:
        opened: the header before it has opened the thinking.
    """
    begun = text.lstrip()
    if not opened and begun.startswith(OPEN):
        opened, text = True, begun[len(OPEN) :]
    thoughts, words = [], []
    if opened:
        thought, closing, text = text.partition(CLOSE)
        if not closing:
            return Thought(thinking=thought.strip(), answer="", closed=False)
        thoughts.append(thought)
        text = text.lstrip()
    while OPEN in text and CLOSE in text[text.index(OPEN) :]:
        before, _, rest = text.partition(OPEN)
        thought, _, text = rest.partition(CLOSE)
        thoughts.append(thought)
        words.append(before)
    thinking = "\n".join(thought.strip() for thought in thoughts) if thoughts else None
    return Thought(thinking=thinking, answer="".join(words) + text)
