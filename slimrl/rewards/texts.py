"""Texts of the policy itself, and where the answer stands in them.

Tools' answers, prompts, thinking and calls are no answer: only the content of the policy's own messages counts.
Everything here takes time linear in the text, which the policy chooses.
"""

import re
from collections.abc import Callable
from functools import partial
from textwrap import dedent
from typing import Any

from slimrl.data.trajectory import Trajectory

BOX = "\\boxed{"
FENCE = "```"
_BRACES = re.compile(r"[{}]|\\.", re.DOTALL)
"""A brace, or a backslash together with the character that it escapes"""
_TAG = re.compile(r"<([A-Za-z][\w-]*)>")


def own_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """All messages after those that began the conversation, as far as the metadata says how many these were.

    Raises:
        ValueError: the trajectory has several roles, each of which has a conversation.
    """
    if "roles" in trajectory.metadata:
        raise ValueError("this reward reads one conversation, and each role has its own; write a reward of your own")
    return trajectory.messages[trajectory.metadata.get("num_prompt_messages", 0) :]


def own_texts(trajectory: Trajectory) -> list[str]:
    """The content of the policy's messages, without thinking and calls."""
    return [message["content"] or "" for message in own_messages(trajectory) if message["role"] == "assistant"]


def last_text(trajectory: Trajectory) -> str | None:
    """The content of the last message; None if it is not the policy's, but for example a tool's answer."""
    messages = own_messages(trajectory)
    return (messages[-1]["content"] or "") if messages and messages[-1]["role"] == "assistant" else None


class AnswerPlace:
    """The place of an answer in the last text.

    Args:
        answer_in: `text` (all of it), `boxed` (the last \\boxed{}), `code` (the last fenced block), or a tag such as
            `<answer>` (between the last closed pair of it).

    Raises:
        ValueError: another `answer_in`.
    """

    def __init__(self, answer_in: str) -> None:
        tag = _TAG.fullmatch(answer_in)
        if tag is None and answer_in not in _PLACES:
            raise ValueError(f"answer_in: {answer_in!r} is neither text, boxed, code nor a tag such as <answer>")
        self._find = _PLACES[answer_in] if tag is None else partial(tagged, name=tag[1])

    def of(self, trajectory: Trajectory) -> str | None:
        """The answer without white space around it; None if there is none or nothing is in it."""
        text = last_text(trajectory)
        found = None if text is None else self._find(text)
        return (found or "").strip() or None


def boxed(text: str) -> str | None:
    """The content of the last closed \\boxed{} of a text, with nested braces; None if there is none.

    Braces with a backslash are characters, such as the one brace of `\\left\\{ 1 \\right.`.
    """
    opened: list[int] = []
    begin, end = -1, -1
    for brace in _BRACES.finditer(text):
        place = brace.start()
        if brace[0] == "{":
            opened.append(place + 1)
        elif brace[0] == "}" and opened and (start := opened.pop()) > begin and text.endswith(BOX, 0, start):
            begin, end = start, place
    return text[begin:end] if begin >= 0 else None


def tagged(text: str, name: str) -> str | None:
    """What stands between the last `</name>` and the `<name>` before it; None if there is no such pair."""
    opening = f"<{name}>"
    end = text.rfind(f"</{name}>")
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None


def only_tagged(text: str, name: str) -> str | None:
    """What stands in the only pair of a tag; None if there is none or a second tag."""
    once = text.count(f"<{name}>") == text.count(f"</{name}>") == 1
    return tagged(text, name) if once else None


def check_tag(name: str, example: str) -> None:
    """Raises ValueError unless it is a name for a tag."""
    if not _TAG.fullmatch(f"<{name}>"):
        raise ValueError(f"tag: {name!r} is no name of a tag, such as {example}")


def fenced(text: str) -> str | None:
    """The lines of the last closed fenced block; None if there is none."""
    blocks = fenced_blocks(text)
    return blocks[-1][1] if blocks else None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The closed blocks between lines that begin with three backticks: what stands behind the first backticks, and the
    lines within, without the indentation that all of them have."""
    found: list[tuple[str, str]] = []
    mark = ""
    block: list[str] | None = None
    for line in text.split("\n"):
        if line.lstrip().startswith(FENCE):
            if block is not None:
                found.append((mark, dedent("\n".join(block))))
            mark, block = line.strip().strip("`").strip(), [] if block is None else None
        elif block is not None:
            block.append(line)
    return found


_PLACES: dict[str, Callable[[str], str | None]] = {"text": str, "boxed": boxed, "code": fenced}
