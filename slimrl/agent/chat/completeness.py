"""Refuses conversations of which a chat template leaves a part out, with what it is and what to do about it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

from slimrl.agent.chat.left_out import ByShape, LeftOut, Write, missing
from slimrl.agent.chat.parts import TOOL, Part, said_parts, tool_parts
from slimrl.agent.chat.template import PROBE_TOOL, ChatTemplate, Marked, Messages, Schemas


class Completeness:
    """
    Args:
        written_turn: writes the last message of a conversation as a policy would.
        stops: texts that end a turn.
    """

    def __init__(self, template: ChatTemplate, written_turn: Write, stops: Sequence[str]) -> None:
        self._template, self._stops = template, stops
        write = partial(template.render, generate=True)
        self._prompts = LeftOut(write, _told)
        self._contexts = LeftOut(write, _told_last)
        self._turns = LeftOut(written_turn, lambda messages, _: said_parts(messages[-1]))
        self._sequences = ByShape(self._of_sequence)
        self._marked = LeftOut(self._write_learned, _said)

    def require_prompt(self, messages: Messages, schemas: Schemas, text: str) -> None:
        """Raises ValueError if a part of the messages or tools is missing from the text of their prompt."""
        self._refuse(self._prompts.of(messages, schemas, text))

    def require_told(self, messages: Messages, schemas: Schemas, since: int, text: str) -> None:
        """The same for messages[since:] and tools, by their text alone: `require_sequence` looks again."""
        self._refuse(missing(_told(messages, schemas, since), text))

    def require_turn(self, messages: Messages, schemas: Schemas, text: str) -> None:
        """Raises ValueError if a part of the last message is missing from the text of the turn; see `require_told`."""
        self._refuse(self._turns.of_text(messages, schemas, text))

    def require_sequence(self, messages: Messages, schemas: Schemas, since: int) -> None:
        """Raises ValueError if the template leaves out a part of turns, or of what stands before them.

        Args:
            messages: of the last turn and all before it. From messages[since] on, each turn goes on from the last one.
        """
        if not self._sequences.of(messages, schemas, since):
            return
        for number in _turns(messages, since):
            self._refuse(self._contexts.of_shape(messages[:number], schemas))
            with in_message(number):
                self._refuse(self._turns.of_shape(messages[: number + 1], schemas))

    def _of_sequence(self, messages: Messages, schemas: Schemas, since: int) -> list[str]:
        """Names of what one rendering of a conversation of marker words leaves out, or writes behind the end of its
        turn."""
        text = self._template.render(messages, schemas, generate=False)
        left_out = missing(tool_parts(schemas or ()), text)
        for message in messages[since:]:
            parts = said_parts(message)
            places = [text.find(str(word)) for part in parts for word in part.values]
            if places and (min(places) < 0 or (message["role"] == "assistant" and self._ends_between(places, text))):
                left_out += [part.name for part in parts]
        return left_out

    def _ends_between(self, places: list[int], text: str) -> bool:
        """Whether a turn ends between the first and the last of these places."""
        said = text[min(places) : max(places)]
        return any(stop in said for stop in self._stops)

    def require_marked(self, messages: Messages, schemas: Schemas, marked: Marked) -> None:
        """Raises ValueError if a part of an assistant's message is not among what the template marks as its."""
        self._refuse(self._marked.of(messages, schemas, self._learned(marked)))

    def _write_learned(self, messages: Messages, schemas: Schemas) -> str:
        marked = self._template.marked(messages, schemas)
        assert marked is not None
        return self._learned(marked)

    def _learned(self, marked: Marked) -> str:
        return self._template.decode([token for token, learned in zip(*marked, strict=True) if learned])

    def _refuse(self, left_out: Sequence[str]) -> None:
        """Raises ValueError if there is something."""
        if not left_out:
            return
        said = f"the chat template leaves out {'; '.join(left_out)}"
        if tools := [name for name in left_out if name.startswith(TOOL)]:
            probe = f"{TOOL} {PROBE_TOOL['function']['name']}"
            named = ", ".join(name for name in tools if name != probe) or "tools in such a conversation"
            raise ValueError(
                f"the chat template leaves out {named}, so that the model would not know what it can call. Set "
                "agent.tool_prompt, which puts tools into the system message (docs/chat.md), or name a template that "
                "shows them in model.chat_template"
            )
        if self._writes_ids_for_names and any("the name of tool_calls" in name for name in left_out):
            raise ValueError(
                f"{said}. It writes ids in place of names: give calls ids such as functions.NAME:0, counted through "
                "the conversation, and results the same as tool_call_id"
            )
        raise ValueError(f"{said}. Name a template that writes it in model.chat_template, or take it out of the data")

    @cached_property
    def _writes_ids_for_names(self) -> bool:
        call = {"id": "id0word", "function": {"name": "name0word", "arguments": {"x": "y"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._template.render([{"role": "user", "content": "q"}, turn], [PROBE_TOOL], generate=False)
        return "id0word" in text and "name0word" not in text


@contextmanager
def in_message(number: int) -> Iterator[None]:
    """Names the message in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"messages[{number}]: {error}") from error


def _told(messages: Messages, schemas: Schemas, since: int = 0) -> list[Part]:
    """What a prompt has to say: all but earlier thinking, which many templates drop as serving does."""
    said = [_placed(number, part) for number in range(since, len(messages))
            for part in said_parts(messages[number], thinking=False)]  # fmt: skip
    return [*tool_parts(schemas or ()), *said]


def _told_last(messages: Messages, schemas: Schemas) -> list[Part]:
    turns = _turns(messages)
    return _told(messages, schemas, since=turns[-1] + 1 if turns else 0)


def _said(messages: Messages, schemas: Schemas) -> list[Part]:
    """What all turns of the assistant say."""
    return [_placed(number, part) for number in _turns(messages) for part in said_parts(messages[number])]


def _turns(messages: Messages, since: int = 0) -> list[int]:
    """Where the assistant's messages are."""
    return [number for number in range(since, len(messages)) if messages[number]["role"] == "assistant"]


def _placed(number: int, part: Part) -> Part:
    return Part(name=f"messages[{number}]: {part.name}", values=part.values)
