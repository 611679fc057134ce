"""Channels: how gpt-oss writes a turn, as messages of OpenAI's harmony format that follow one another.

The header of a turn is `<|start|>assistant`. Then come `<|channel|>NAME<|message|>TEXT`, each but the last closed by
`<|end|>` and followed by another header. Channel `analysis` is thinking, `final` the answer, `commentary` words to the
user, or a call if its header has `to=`. The model ends its answer with `<|return|>`, for which templates write
`<|end|>` in turns that are over.
"""

from slimrl.agent.chat.thinking import Thought

CHANNEL, MESSAGE, START, END, RETURN = "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|return|>"
THINKING, CALLED = "analysis", "to="


def split_channels(text: str, *, opened: bool = False) -> Thought:
    """Thinking and words of a turn, which begins behind its header. Calls stay in the words as they are written.

    Args:
        opened: never; arguments are those of `split_thinking`.
    """
    thoughts, words, closed = [], [], True
    for part in text.split(START):
        header, begun, said = part.partition(MESSAGE)
        channel = header.removeprefix(CHANNEL).split(maxsplit=1)
        closed = END in said
        said = said.partition(END)[0]
        if channel[:1] == [THINKING]:
            thoughts.append(said.strip())
            continue
        closed = True
        words.append(said if begun and CALLED not in header else part)
    thinking = "\n".join(thoughts) if thoughts else None
    return Thought(thinking=thinking, answer="\n".join(filter(None, words)), closed=closed)
