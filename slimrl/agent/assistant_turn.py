"""One turn of the policy, parsed from the tokens that it sampled: thinking, text and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from slimrl.agent.bounded_parser import BoundedParser
from slimrl.agent.dialogue import Dialogue
from slimrl.agent.environment import Message
from slimrl.agent.parsers import ParsedTurn
from slimrl.agent.tool_call import MalformedCall, ToolCall


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    text: str
    """Text without thinking and calls; the whole answer, without blanks around it, if a call is malformed"""
    reasoning: str | None
    """Thinking of the turn, if there is any"""
    calls: tuple[ToolCall | MalformedCall, ...]
    can_be_answered: bool
    """Whether it ended with a token after which the conversation may go on"""

    @property
    def is_malformed(self) -> bool:
        return any(isinstance(call, MalformedCall) for call in self.calls)

    @property
    def message(self) -> Message:
        """The turn as a message for chat templates, without calls if one of them is malformed."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls and not self.is_malformed:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
                if isinstance(call, ToolCall)
            ]
        return message


async def parse_turn(
    tokens: Sequence[int],
    dialogue: Dialogue,
    *,
    in_thinking: bool,
    cut_off: bool,
    num_calls: int,
    stop: Sequence[str] = (),
) -> AssistantTurn | None:
    """Parse a turn; None if the turn goes on, because it stopped at a call within its thinking.

    Args:
        tokens: that the policy sampled of the turn.
        in_thinking: the context before them ends within thinking.
        cut_off: they end because no more could be sampled, so that the turn does not go on.
        num_calls: before this turn, for the ids of calls whose format has none.
        stop: texts that end a turn and are no part of it.
    """
    chat = dialogue.chat
    text = chat.turn_text(tokens)
    end = min((place for place in map(text.find, stop) if place >= 0), default=len(text))
    thought = chat.split_turn(text[:end], opened=in_thinking)
    last = tokens[-1] if tokens else None
    at_call = last in dialogue.stop_token_ids and last not in chat.stop_token_ids
    if at_call and not thought.closed and not cut_off:
        return None
    parser = dialogue.parser
    parsed = await parser.read(thought.answer) if isinstance(parser, BoundedParser) else parser.parse(thought.answer)
    if len(parsed.calls) > 1 and not chat.takes_parallel_calls:
        parsed = ParsedTurn(content=parsed.content, calls=[MalformedCall(problem="only one tool call at a time")])
    calls = _with_ids(parsed.calls, num_calls)
    malformed = any(isinstance(call, MalformedCall) for call in calls)
    return AssistantTurn(
        text=thought.answer.strip() if malformed else parsed.content,
        reasoning=thought.thinking,
        calls=calls,
        can_be_answered=last in (dialogue.call_ends if calls else chat.answer_ends),
    )


def _with_ids(calls: Sequence[ToolCall | MalformedCall], num_calls: int) -> tuple[ToolCall | MalformedCall, ...]:
    """The calls with an id each of its own, also where the policy wrote none, or the same one twice: clients tell calls
    apart by them.

    Args:
        num_calls: before these.
    """
    taken = {call.id for call in calls}
    given = dict[str, ToolCall | MalformedCall]()
    for number, call in enumerate(calls, num_calls):
        own = call.id
        if not own or own in given:
            own = next(name for extra in count() if (name := f"call_{number + extra}") not in taken)
            taken.add(own)
        given[own] = replace(call, id=own)
    return tuple(given.values())
