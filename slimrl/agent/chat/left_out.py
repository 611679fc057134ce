"""What a rendering leaves out of a conversation.

A chat template says nothing when it has no words for a part: for tools, calls, thinking, or words next to a call. Two
looks together find that:

1. Each text is looked for in the rendering itself. What depends on a text is found so, such as a template that takes
   what follows a tag for the whole answer.
2. A short text may stand there for another reason. So a conversation of the same shape, with words that occur nowhere
   else, is rendered too, once for each shape. Turns that go on from one another are looked for in one rendering: a
   rendering for each would cost as much as reading them.
"""

import hashlib
from collections.abc import Callable

from slimrl.agent.chat.parts import Part, with_marker_words
from slimrl.agent.chat.template import PROBE_TOOL, Messages, Schemas

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
        self._parts = parts
        self._by_shape = ByShape(lambda messages, tools, _: missing(parts(messages, tools), write(messages, tools)))

    def of(self, messages: Messages, schemas: Schemas, text: str) -> list[str]:
        """Names of the parts that are missing from the conversation's rendering, by both looks.

        Raises:
            ValueError: the template refuses a conversation of this shape.
        """
        return list(dict.fromkeys(self.of_text(messages, schemas, text) + self.of_shape(messages, schemas)))

    def of_text(self, messages: Messages, schemas: Schemas, text: str) -> list[str]:
        """The first look alone."""
        return missing(self._parts(messages, schemas), text)

    def of_shape(self, messages: Messages, schemas: Schemas) -> list[str]:
        """The second look alone. Raises ValueError as `of` does."""
        return self._by_shape.of(messages, schemas)


class ByShape:
    """Answers about conversations that are remembered by their shape.

    Args:
        find: names of the parts that are left out of (messages of marker words, tools, the index `since`).
    """

    def __init__(self, find: Callable[[Messages, Schemas, int], list[str]]) -> None:
        self._find = find
        self._known: dict[bytes, list[str]] = {}

    def of(self, messages: Messages, schemas: Schemas, since: int = 0) -> list[str]:
        """The answer for a conversation, of which the messages from `since` on matter."""
        marked, has_tools = with_marker_words(messages), bool(schemas)
        key = hashlib.blake2b(repr((marked, has_tools, since)).encode(), digest_size=16).digest()
        if key not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[key] = self._find(marked, [PROBE_TOOL] if has_tools else None, since)
        return self._known[key]


def missing(parts: list[Part], text: str) -> list[str]:
    """Names of the parts that do not stand in the text."""
    return [part.name for part in parts if not part.stands_in(text)]
