"""Channels: how gpt-oss writes a turn, as messages of OpenAI's harmony format that follow one another.

The header of a turn is `<|start|>assistant`. Then come `<|channel|>NAME<|message|>TEXT`, each but the last closed by
`<|end|>` and followed by another header. Channel `analysis` is thinking, `final` the answer, `commentary` words to the
user. A message whose header has a recipient, `to=functions.NAME` before or behind the channel, is a call. `<|call|>`
ends it. The model ends its answer with `<|return|>`, for which templates write `<|end|>` in turns that are over.
"""

import re
from dataclasses import dataclass

from slimrl.agent.chat.thinking import Thought

CHANNEL, MESSAGE, START, END, RETURN = "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|return|>"
CALL = "<|call|>"
THINKING = "analysis"

_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_ENDS = re.compile("|".join(map(re.escape, (END, CALL, RETURN))))


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of the assistant."""

    channel: str
    """Empty if it names none."""
    recipient: str | None
    """What it calls, with its namespace; None for words."""
    text: str
    begun: bool
    """Whether its text has begun, behind its header"""
    ended: bool
    written: str
    """The whole as it was written, behind `<|start|>assistant`"""


def messages_of(text: str) -> list[Message]:
    """The messages of a turn, which begins behind its header. Text without a header is one of words."""
    return [_message(part) for part in text.split(START) if part]


def _message(written: str) -> Message:
    header, begun, said = written.partition(MESSAGE)
    if not begun and CHANNEL not in header:
        header, said = "", written
    # The recipient may stand on either side of the channel, and what constrains the text follows it.
    before, _, behind = header.partition(CHANNEL)
    recipient = _RECIPIENT.search(before) or _RECIPIENT.search(behind)
    ended = _ENDS.search(said)
    return Message(
        channel=re.split(r"[\s<]", behind, maxsplit=1)[0],
        recipient=recipient[1] if recipient and recipient[1] != "assistant" else None,
        text=said[: ended.start()] if ended else said,
        begun=bool(begun),
        ended=ended is not None,
        written=written,
    )


def split_channels(text: str, *, opened: bool = False) -> Thought:
    """Thinking and answer of a turn, which begins behind its header. Calls stay in the answer as they are written.

    Args:
        opened: never; arguments are those of `split_thinking`.
    """
    thoughts, answer, called, closed = list[str](), "", False, True
    for message in messages_of(text):
        thinks = message.channel == THINKING and message.recipient is None
        closed = message.ended or not thinks
        if thinks:
            thoughts.append(message.text.strip())
        elif message.recipient is not None:
            answer += (START if answer else "") + message.written
            called = True
        elif message.text:
            # A header of its own keeps words apart from a call before them, and from what looks like a header.
            marked = called or MESSAGE in message.text or CHANNEL in message.text
            answer += ((START if answer else "") + MESSAGE if marked else "\n" if answer else "") + message.text
    return Thought(thinking="\n".join(thoughts) if thoughts else None, answer=answer, closed=closed)
