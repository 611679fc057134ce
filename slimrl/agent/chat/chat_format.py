"""Conversations as token ids: prompts, what stands between two turns of the policy, and examples to learn from.

The chat template alone says how anything is written. What the policy sampled is never tokenized again: the tokens
between its turns come from rendering a conversation of the same shape and taking what follows the assistant's calls.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from slimrl.agent.chat.channels import CHANNEL, END, RETURN, split_channels
from slimrl.agent.chat.completeness import Completeness, in_message
from slimrl.agent.chat.left_out import LeftOut
from slimrl.agent.chat.parts import said_parts, thinking_and_words
from slimrl.agent.chat.template import PROBE_TOOL, ChatTemplate, Messages, Schemas
from slimrl.agent.chat.thinking import PLAIN, opens_thinking, split_thinking, thinking_tags

_QUESTION: dict[str, Any] = {"role": "user", "content": "q"}
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "last words"}
_LAST = "last argument"
"""Value of the only argument of made-up calls: the calls of a rendering end after its last occurrence."""
_RESULT = "a result"


@dataclass(frozen=True, kw_only=True)
class CallName:
    """What a template may repeat of a call in its result."""

    id: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Context:
    """The tokens before a turn of the policy."""

    tokens: list[int]
    opens_thinking: bool
    """Whether the tokens end within thinking, which the policy continues."""


def tool_results(calls: Sequence[CallName], results: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of tools, one for each call."""
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


class ChatFormat:
    """The format of one model's conversations.

    Args:
        stop_token_ids: the tokens that end a turn.
    """

    def __init__(self, template: ChatTemplate, stop_token_ids: Sequence[int]) -> None:
        self.template = template
        self.stop_token_ids = tuple(stop_token_ids)
        self._questions: dict[str, str] = {}
        """Rendered question to a model for each set of tools, by their schemas as JSON"""
        self._stop_texts = [template.decode([token]) for token in stop_token_ids]
        self.thinking_tags = thinking_tags(template.reserved)
        split = partial(split_thinking, tags=self.thinking_tags)
        self.split_turn = split_channels if CHANNEL in template.reserved else split
        """Function that tells thinking and words of a turn apart"""
        self._whole = Completeness(template, self.written_turn, self._stop_texts)

    def token_id(self, text: str) -> int | None:
        """Id of a text that is one token, such as the marker at the end of a call; None if it is several."""
        ids = self.template.encode(text)
        return ids[0] if len(ids) == 1 else None

    def turn_text(self, tokens: Sequence[int]) -> str:
        """Text of the policy's turn without the token that ended it."""
        ended = bool(tokens) and tokens[-1] in self.stop_token_ids
        return self.template.decode(tokens[:-1] if ended else tokens)

    def prompt(self, messages: Messages, schemas: Schemas, *, whole: bool = False) -> Context:
        """A prompt with the header of the assistant's turn.

        Args:
            whole: refuse messages of which the template leaves words, calls or tools out.

        Raises:
            ValueError: the template refuses these messages, or leaves some of them out.
        """
        text = self.template.render(messages, schemas, generate=True)
        if whole:
            self._whole.require_prompt(messages, schemas, text)
        header = self._header_of(text, messages, schemas)
        return Context(tokens=self.template.encode(text), opens_thinking=self._opens_thinking(header))

    def require_shown(self, schemas: Schemas) -> None:
        """Raises ValueError if the template does not show a model these tools."""
        if schemas:
            text = self.template.render([_QUESTION], schemas, generate=True)
            self._whole.require_prompt([_QUESTION], schemas, text)

    def require_ends(self) -> None:
        """Raises ValueError if the template writes no stop token after an answer, so that no turn could follow."""
        if self.answer_ends:
            return
        said_end, text = self._followed([], [_QUESTION], None)
        reserved = self.template.reserved
        written = next((token for token in self.template.encode(text[said_end:]) if token in reserved.values()), None)
        stops = ", ".join(f"{self._stop_text(token)!r} ({token})" for token in self.stop_token_ids)
        said = f"the chat template ends an answer with none of the tokens that end a turn, {stops}"
        if written is None:
            raise ValueError(f"{said}; name another template in model.chat_template")
        raise ValueError(
            f"{said}, but with {self._stop_text(written)!r}. Set agent.stop_token_ids: "
            f"{[written, *self.stop_token_ids]}"
        )

    def not_repeated(self, schemas: Schemas) -> list[str]:
        """What the template leaves out of earlier turns of an episode with these tools."""
        turn: dict[str, Any] = {**_ANSWER, "reasoning_content": "first thoughts"}
        told: list[dict[str, Any]] = [_QUESTION]
        if schemas:
            call = CallName(id="functions.f:0", name="f")
            turn["tool_calls"] = _calls([call])
            told = tool_results([call], [_RESULT])
        write = partial(self.template.render, generate=True)
        left_out = LeftOut(write, lambda messages, _: said_parts(messages[1]))
        finished = [_QUESTION, turn, *told]
        return left_out.of(finished, schemas, write(finished, schemas))

    def rewrites_results(self, schemas: Schemas) -> bool:
        """Whether the template writes a call or its result differently once a later call follows."""
        turns = [[{**_ANSWER, "content": "", "tool_calls": _calls([call])}, *tool_results([call], [_RESULT])]
                 for call in (CallName(id=f"functions.f:{number}", name="f") for number in range(2))]  # fmt: skip
        one = self.template.render([_QUESTION, *turns[0]], schemas, generate=False)
        two = self.template.render([_QUESTION, *turns[0], *turns[1]], schemas, generate=False)
        return not two.startswith(one)

    def _header_of(self, text: str, messages: Messages, schemas: Schemas) -> str:
        """The header of the assistant's turn at the end of a rendered prompt."""
        if text.endswith(self._header):
            return self._header
        # It depends on what it follows, or the template closes the last message differently before it.
        own = _rest(self.template.render(messages, schemas, generate=False), text)
        return self._header if own is None else own

    def join(self, last_token: int, calls: Sequence[CallName], messages: Messages, schemas: Schemas) -> Context:
        """What stands between the policy's turn and its next one.

        Args:
            last_token: the token at which the policy stopped: the end of the turn, or of its call.
            calls: the calls of the turn; none if it was words alone.
            messages: what the policy is told, at least one message, with reserved tokens escaped.

        Raises:
            ValueError: the template does not write `last_token` after such a turn, or refuses the messages.
        """
        said_end, text = self._followed(calls, messages, schemas)
        end = self._stop_text(last_token)
        position = text.find(end, said_end)
        if position < 0:
            raise ValueError(f"the chat template writes no {end!r} after {'a tool call' if calls else 'an answer'}")
        first, *tokens = self.template.encode(text[position:])
        assert first == last_token or end == END, "a token that ends a turn is split from what follows"
        by_tool = messages[-1]["role"] == "tool"
        opens = self.opens_thinking_after_results if by_tool else self._opens_thinking(self._header)
        return Context(tokens=tokens, opens_thinking=opens)

    @cached_property
    def call_ends(self) -> frozenset[int]:
        """The stop tokens that the template writes after a call, so that results may follow them."""
        calls_end, text = self._one_call
        between = text[calls_end : text.rindex(_RESULT)]
        return frozenset(token for token in self.stop_token_ids if self._stop_text(token) in between)

    @cached_property
    def answer_ends(self) -> frozenset[int]:
        """The stop tokens that the template writes after an answer, so that a next question may follow them."""
        said_end, text = self._followed([], [_QUESTION], None)
        return frozenset(token for token in self.stop_token_ids if self._stop_text(token) in text[said_end:])

    @cached_property
    def takes_parallel_calls(self) -> bool:
        """Whether the template writes several calls in one turn."""
        calls = [CallName(id=f"functions.f:{i}", name="f") for i in range(2)]
        try:
            self._followed(calls, tool_results(calls, [_RESULT] * 2), [PROBE_TOOL])
        except ValueError:
            return False
        return True

    @cached_property
    def opens_thinking_after_results(self) -> bool:
        """Whether the header after a tool's result opens thinking."""
        _, text = self._one_call
        return self._opens_thinking(text[text.rindex(_RESULT) :])

    def written_turn(self, messages: Messages, schemas: Schemas) -> str:
        """The text that a policy would write to get the last message, an assistant's, with the end of the turn.

        Raises:
            ValueError: the template refuses the messages, or writes no stop token of the model after such a turn.
        """
        return self._written_after(self.template.render(messages[:-1], schemas, generate=True), messages, schemas)

    def _written_after(self, before: str, messages: Messages, schemas: Schemas) -> str:
        """`written_turn` behind its rendered prompt."""
        after = self.template.render(messages, schemas, generate=False)
        text = _rest(before, after)
        if text is None:
            raise ValueError(
                "the chat template renders a prompt differently once the assistant has answered: the whole "
                f"conversation does not start with the prompt, which ends with {before[-80:]!r}. Name a template that "
                "goes on from its prompts in model.chat_template, or set a variable of this one in "
                "agent.chat_template_kwargs, such as one that turns thinking off"
            )
        ends = [(text.find(stop), stop) for stop in self._stop_texts]
        found = [(position, stop) for position, stop in ends if position >= 0]
        if found:
            position, stop = min(found)
            return text[: position + len(stop)]
        end = self._end_of_calls if messages[-1].get("tool_calls") else self._end_of_answer
        if end is None:
            stops = ", ".join(map(repr, self._stop_texts))
            raise ValueError(
                f"the chat template writes none of the model's stop tokens after a turn: {stops}. Name those that it "
                "writes in agent.stop_token_ids, or another template in model.chat_template"
            )
        return text.rstrip("\n") + end

    def training_sequences(self, messages: Messages, schemas: Schemas) -> list[tuple[list[int], list[bool]]]:
        """A whole conversation as (tokens, mask) pairs; the mask is true on the assistant's turns and their ends.

        By the template's own marks if it has any. Otherwise each turn stands behind the prompt that the policy would
        have had. There are several sequences if the template writes earlier turns differently once later ones follow,
        as those do that drop thinking.

        Raises:
            ValueError: the template refuses these messages, leaves a part of them out, does not continue the prompt of
                a turn with that turn, or writes no stop token after it.
        """
        if (marked := self.template.marked(messages, schemas)) is not None:
            if not any(marked[1]):
                raise ValueError("the chat template marks nothing of it as the assistant's")
            self._whole.require_marked(messages, schemas, marked)
            self.prompt(messages, schemas, whole=True)
            return [marked]
        sequences: list[_Sequence] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise ValueError("messages[0] is the assistant's; a conversation begins with a user or system message")
            prompt = self.template.render(messages[:number], schemas, generate=True)
            added = _rest(sequences[-1].text, prompt) if sequences else None
            if added is None:
                sequences.append(_Sequence(since=sequences[-1].end if sequences else 0))
                added = prompt
            growing = sequences[-1]
            # Tools stand before the first turn of a sequence.
            self._whole.require_told(messages[:number], None if growing.text else schemas, growing.end, added)
            growing.end = number + 1
            with in_message(number):
                self._refuse_stops_in(message)
                turn = self._written_after(prompt, messages[: growing.end], schemas)
                self._refuse_tags(messages[: growing.end], schemas, prompt, turn)
                self._whole.require_turn(messages[: growing.end], schemas, turn)
            growing.add(added, self.template.encode(added), learned=False)
            growing.add(turn, self.template.encode(turn), learned=True)
        for sequence in sequences:
            self._whole.require_sequence(messages[: sequence.end], schemas, sequence.since)
        return [(sequence.tokens, sequence.mask) for sequence in sequences]

    def _refuse_stops_in(self, message: dict[str, Any]) -> None:
        """Raises ValueError if the words of a turn would end it."""
        parts = [message.get("content"), message.get("reasoning_content"), *(message.get("tool_calls") or ())]
        words = json.dumps(parts, ensure_ascii=False, default=str)
        for stop in self._stop_texts:
            if stop in words:
                raise ValueError(f"its text holds {stop!r}, which ends a turn")

    def _refuse_tags(self, messages: Messages, schemas: Schemas, prompt: str, turn: str) -> None:
        """Raises ValueError if a tag of thinking in a text makes the turn say other words than its message."""
        thought, words = thinking_and_words(messages[-1])
        # Others than the plain ones are not what a message may begin with in place of `reasoning_content`.
        own = self.split_turn is split_channels or self.thinking_tags != PLAIN
        text = messages[-1].get("content") or "" if own else words
        tags = (*PLAIN, *self.thinking_tags)
        if not any(tag in thought or tag in text for tag in tags):
            return
        header = self._header_of(prompt, messages[:-1], schemas)
        said = self.split_turn(turn, opened=self._opens_thinking(header))
        if (said.thinking or "").strip() != thought or words not in said.answer:
            raise ValueError(
                f"its text holds {PLAIN.open!r} or {PLAIN.close!r}, so that the model would read other bounds of "
                "thinking than it has; thinking stands in `reasoning_content`"
            )

    def _followed(self, calls: Sequence[CallName], messages: Messages, schemas: Schemas) -> tuple[int, str]:
        """The end of a turn's words in a rendered conversation, and the text, up to the header of the next turn."""
        made_up = _ANSWER
        if calls:
            made_up = {"role": "assistant", "content": "", "tool_calls": _calls(calls)}
        before = self._question(schemas)
        text = self.template.render([_QUESTION, made_up, *messages], schemas, generate=True)
        position = len(before) if text.startswith(before) else 0
        last = _LAST if calls else _ANSWER["content"]
        for _ in range(len(calls) or 1):
            position = text.find(last, position) + len(last)
            if position < len(last):
                raise ValueError(f"the chat template does not write {'tool calls' if calls else 'an answer'}")
        return position, text

    def _question(self, schemas: Schemas) -> str:
        """A question to a model that is shown these tools."""
        key = json.dumps(schemas)
        if key not in self._questions:
            self._questions[key] = self.template.render([_QUESTION], schemas, generate=False)
        return self._questions[key]

    @cached_property
    def _one_call(self) -> tuple[int, str]:
        """A conversation with one call and its result; see `_followed`."""
        calls = [CallName(id="functions.f:0", name="f")]
        calls_end, text = self._followed(calls, tool_results(calls, [_RESULT]), [PROBE_TOOL])
        if _RESULT not in text[calls_end:]:
            raise ValueError("the chat template does not write a tool's result; name another in model.chat_template")
        return calls_end, text

    @cached_property
    def _header(self) -> str:
        question = self.template.render([_QUESTION], None, generate=False)
        return _rest(question, self.template.render([_QUESTION], None, generate=True)) or ""

    @cached_property
    def _end_of_answer(self) -> str | None:
        """The stop token that the template writes between an answer and a next question."""
        text = self.template.render([_QUESTION, _ANSWER, _QUESTION], None, generate=False)
        return self._first_stop(text[text.rindex(_ANSWER["content"]) :])

    @cached_property
    def _end_of_calls(self) -> str | None:
        """The stop token that the template writes between a call and its result."""
        calls_end, text = self._one_call
        return self._first_stop(text[calls_end:])

    def _first_stop(self, text: str) -> str | None:
        stops = [stop for stop in self._stop_texts if stop in text]
        return min(stops, key=text.index, default=None)

    def _opens_thinking(self, header: str) -> bool:
        return opens_thinking(header, self.thinking_tags)

    def _stop_text(self, token: int) -> str:
        """What the template writes of a token that ended a turn, once the turn is over."""
        text = self.template.decode([token])
        return END if text == RETURN else text


class _Sequence:
    """The text, tokens and mask of a conversation that grows.

    Args:
        since: the first message that no sequence before it holds.
    """

    def __init__(self, since: int) -> None:
        self.since = self.end = since
        """`end` is where its messages end"""
        self.text = ""
        self.tokens: list[int] = []
        self.mask: list[bool] = []

    def add(self, text: str, tokens: list[int], *, learned: bool) -> None:
        self.text += text
        self.tokens += tokens
        self.mask += [learned] * len(tokens)


def _calls(calls: Sequence[CallName]) -> list[dict[str, Any]]:
    """Calls of one made-up argument."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": {"x": _LAST}}}
        for call in calls
    ]


def _rest(prefix: str, text: str) -> str | None:
    """What follows the prefix in the text; None if it does not begin with it."""
    return text[len(prefix) :] if text.startswith(prefix) else None
