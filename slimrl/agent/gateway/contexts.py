"""The tokens after which the policy answers: those of a turn that the request continues, with what came after it, or
the whole conversation as the chat template writes it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slimrl.agent.chat.chat_format import CallName, Context
from slimrl.agent.dialogue import Dialogue, Dialogues
from slimrl.agent.environment import Message, call_name
from slimrl.agent.gateway.chat_request import ChatRequest
from slimrl.agent.gateway.errors import refused
from slimrl.agent.gateway.history import History, SampledTurn
from slimrl.agent.gateway.messages import Echo, history_key
from slimrl.config.schema.agent import HistoryMode


@dataclass(frozen=True, kw_only=True)
class TurnContext:
    """What a request asks the policy to go on from."""

    dialogue: Dialogue
    parent: SampledTurn | None
    told: list[int]
    told_messages: Sequence[Message]
    in_thinking: bool
    tokens: list[int]
    """All tokens of the context"""


def context_of(request: ChatRequest, history: History, dialogues: Dialogues, mode: HistoryMode) -> TurnContext:
    """Raises ApiError: the chat template or the parser cannot take these tools or messages."""
    try:
        dialogue = dialogues.of(request.tools)
    except (ValueError, TypeError, LookupError) as error:
        raise refused(f"tools: {error}") from error
    messages = request.messages
    last = max((number for number, one in enumerate(messages) if one["role"] == "assistant"), default=None)
    if last is not None:
        found = history.find(history_key(request.tools, messages[:last], request.role), messages[last])
        if found is not None and (after := _followed(*found, messages[last + 1 :], dialogue, mode)) is not None:
            return after
    try:
        written = dialogue.chat.prompt(messages, dialogue.schemas)
    except ValueError as error:
        raise refused(f"messages: {error}") from error
    return _root(dialogue, messages, written)


def _root(dialogue: Dialogue, messages: Sequence[Message], written: Context) -> TurnContext:
    return TurnContext(
        dialogue=dialogue,
        parent=None,
        told=written.tokens,
        told_messages=messages,
        in_thinking=written.opens_thinking,
        tokens=written.tokens,
    )


def _followed(
    parent: SampledTurn, echo: Echo, messages: Sequence[Message], dialogue: Dialogue, mode: HistoryMode
) -> TurnContext | None:
    """The context after a sampled turn; None if its tokens cannot be gone on from."""
    # Calls of a malformed turn are words to the client, which answers none of them.
    answered = () if parent.parsed.is_malformed else parent.parsed.calls
    answers = [{**one, "tool_call_id": call.id} for one, call in zip(messages, answered, strict=False)]
    told = [*answers, *messages[len(answers) :]]
    before = parent.tokens
    try:
        if mode is HistoryMode.template:
            if echo.added is not None:
                return None
            whole = [*parent.messages, *told]
            written = dialogue.chat.prompt(whole, dialogue.schemas)
            if written.tokens[: len(before)] != before:
                return _root(dialogue, whole, written)
            written = replace(written, tokens=written.tokens[len(before) :])
        elif echo.added is not None:
            written = _after_stop_text(dialogue, echo.added, told)
            told = [{"role": "assistant", "content": echo.added}, *told] if echo.added else told
        elif parent.parsed.can_be_answered:
            written = dialogue.chat.join(before[-1], _call_names(parent, dialogue), told, dialogue.schemas)
        else:
            return None
    except ValueError:
        return None  # the template has no words for it there; written whole, it may have
    return TurnContext(
        dialogue=dialogue,
        parent=parent,
        told=written.tokens,
        told_messages=told,
        in_thinking=written.opens_thinking,
        tokens=[*before, *written.tokens],
    )


def _call_names(turn: SampledTurn, dialogue: Dialogue) -> list[CallName]:
    """The calls behind which the template writes what comes after a turn."""
    names = [CallName(id=call.id, name=call_name(call)) for call in turn.parsed.calls]
    if not turn.parsed.is_malformed:
        return names
    ended_as_words = turn.tokens[-1] in dialogue.chat.answer_ends
    return [] if ended_as_words else names[-1:]


def _after_stop_text(dialogue: Dialogue, added: str, told: Sequence[Message]) -> Context:
    """What follows a turn that a stop text ended: the client's words behind it, and the end that the policy did not
    come to write.

    Raises:
        ValueError: the template has no end of an answer there.
    """
    chat = dialogue.chat
    end = next((token for token in chat.stop_token_ids if token in chat.answer_ends), None)
    if end is None:
        raise ValueError("the chat template writes none of the model's stop tokens after an answer")
    written = chat.join(end, [], told, dialogue.schemas)
    words = chat.template.encode(chat.template.escape(added)) if added else []
    return replace(written, tokens=[*words, end, *written.tokens])
