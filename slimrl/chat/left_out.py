"""What a rendering leaves out of a conversation.

A chat template says nothing when it has no words for a part: for tools, calls, thinking, or words next to a call. Two
looks together find that:

1. Each text is looked for in the rendering itself. What depends on a text is found so, such as a template that takes
   what follows a tag for the whole answer.
2. A short text may stand there for another reason. So a conversation of the same shape, with words that occur nowhere
   else, is rendered too, once for each shape.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from slimrl.chat.parts import Part, with_marker_words
from slimrl.chat.template import PROBE_TOOL, Messages, Schemas

MOST_KEPT = 100_000
"""Shapes that are remembered; long conversations have many"""

Write = Callable[[Messages, Schemas], str]
PartsOf = Callable[[Messages, Schemas], list[Part]]


class LeftOut:
    """Args:
    write: the rendering of a conversation.
    parts: what has to stand in it; their names follow from the conversation's shape alone.
    """

    def __init__(self, write: Write, parts: PartsOf) -> None:
        self._write, self._parts = write, parts
        self._by_shape: dict[bytes, list[str]] = {}

    def of(self, messages: Messages, schemas: Schemas, text: str) -> list[str]:
        """Names of the parts that are missing from the conversation's rendering.

        Raises:
            ValueError: the template refuses a conversation of this shape.
        """
        missing = _missing(self._parts(messages, schemas), text)
        return list(dict.fromkeys(missing + self._of_shape(with_marker_words(messages), bool(schemas))))

    def _of_shape(self, messages: list[dict[str, Any]], has_tools: bool) -> list[str]:
        key = hashlib.blake2b(repr((messages, has_tools)).encode(), digest_size=16).digest()
        if key not in self._by_shape:
            if len(self._by_shape) >= MOST_KEPT:
                self._by_shape.clear()
            tools = [PROBE_TOOL] if has_tools else None
            self._by_shape[key] = _missing(self._parts(messages, tools), self._write(messages, tools))
        return self._by_shape[key]


def _missing(parts: list[Part], text: str) -> list[str]:
    return [part.name for part in parts if not part.stands_in(text)]
