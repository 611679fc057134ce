"""The turns that the policy sampled in one trajectory, as a tree: what was said, and what came after it.

1. A turn follows another one if its history is that turn's with further messages; its tokens then continue the other's
   exactly as they were sampled. Any other turn is a root, whose prompt the chat template wrote. A turn is found by what
   was asked, and then by what the client gives back as its answer.
2. A turn that is taken back, because its client was gone, leaves nothing.
3. At the end each path from a root becomes a segment. Of several turns that follow the same one, the first continues
   its segment; each other begins a segment whose context is what both share. Every turn is trained in one segment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slimrl.agent.assistant_turn import AssistantTurn
from slimrl.agent.environment import Message
from slimrl.agent.gateway.messages import Echo, echo
from slimrl.agent.tool_call import MalformedCall
from slimrl.agent.transcript import Transcript
from slimrl.data.engine import GenerateResult
from slimrl.data.trajectory import Segment


@dataclass(eq=False, kw_only=True)
class SampledTurn:
    """One turn of the policy, and the messages that it got before it."""

    parent: "SampledTurn | None"
    told: list[int]
    """Tokens after the parent's turn; of a root, the whole prompt"""
    told_messages: Sequence[Message]
    """The same tokens as messages"""
    results: Sequence[GenerateResult]
    """Several if the turn went on after a call within its thinking"""
    parsed: AssistantTurn
    is_cut_off: bool
    """Whether the turn ended because no more tokens could be sampled."""
    stop_text: str | None
    """Stop text of the client that ended the turn; None if none did"""
    asked: bytes
    """Key of the history before the turn"""
    number: int
    """Number of this sample among those of its history"""
    role: str = ""
    """Role that asked, in an agent of several"""
    children: list["SampledTurn"] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        return [token for result in self.results for token in result.tokens]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole context, up to the end of the turn."""
        parts = [part for turn in self.path for part in (turn.told, turn.sampled)]
        return [token for part in parts for token in part]

    @property
    def path(self) -> list["SampledTurn"]:
        """The turns from the root to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the end of the turn, with a message for each of the policy's turns.

        What a client wrote behind a stop text stands in the message of the turn that the text ended.
        """
        messages = list[Message]()
        for turn in self.path:
            told = list(turn.told_messages)
            if turn.parent is not None and told and told[0]["role"] == "assistant":
                ended, behind = messages.pop(), told.pop(0)
                content = f"{ended['content']}{turn.parent.stop_text}{behind['content']}"
                messages.append({**ended, "content": content})
            messages += [*told, turn.parsed.message]
        return messages

    @property
    def num_calls(self) -> int:
        """Calls of the conversation, this turn's included."""
        return sum(len(turn.parsed.calls) for turn in self.path)

    @property
    def experts(self) -> list[np.ndarray]:
        """Experts of the first tokens of the context, as the engine reported them: int16 arrays [tokens, layers,
        top-k]."""
        reported = [result.routed_experts for turn in self.path for result in turn.results]
        return [rows for rows in reported if rows is not None]


class History:
    """All turns that the policy sampled in one trajectory."""

    def __init__(self) -> None:
        self._roots: list[SampledTurn] = []
        self._asked: dict[bytes, list[SampledTurn]] = {}
        self.last: SampledTurn | None = None
        """The turn that was sampled last"""

    def find(self, asked: bytes, given: Message) -> tuple[SampledTurn, Echo] | None:
        """The turn after a history that a client gives back as this message, the last one of several.

        None too if the client left out words, and several turns differ in them.
        """
        turns = reversed(self._asked.get(asked, []))
        found = [(turn, same) for turn in turns if (same := echo(turn.parsed.message, given, turn.stop_text))]
        whole = [one for one in found if one[1].is_whole]
        return whole[0] if whole else found[0] if len(found) == 1 else None

    def add(self, turns: Sequence[SampledTurn]) -> None:
        for turn in turns:
            (self._roots if turn.parent is None else turn.parent.children).append(turn)
            self._asked.setdefault(turn.asked, []).append(turn)
            self.last = turn

    def take_back(self, turns: Sequence[SampledTurn]) -> bool:
        """Remove turns; does nothing if another one follows one of them, which its client must then have got."""
        if any(turn.children for turn in turns):
            return False
        for turn in turns:
            (self._roots if turn.parent is None else turn.parent.children).remove(turn)
            self._asked[turn.asked].remove(turn)
        left = list(self.turns())
        if self.last in turns:
            self.last = left[-1] if left else None
        return True

    def turns(self) -> Iterator[SampledTurn]:
        """All turns in the order in which `segments` numbers them."""
        for chain in self._chains():
            yield from chain

    def segments(self) -> list[Segment]:
        """The trajectory's segments: the tokens of all turns, each trained once."""
        done, num_turns = [], 0
        for chain in self._chains():
            first = chain[0]
            before = [] if first.parent is None else first.parent.tokens
            experts = [] if first.parent is None else first.parent.experts
            transcript = Transcript([*before, *first.told], num_turns, experts)
            for turn in chain:
                if turn is not first:
                    transcript.add_tool_results(turn.told)
                for number, result in enumerate(turn.results):
                    transcript.add_turn(result, goes_on=number > 0)
            num_turns = transcript.num_turns
            done.append(replace(transcript.segment(), role=first.role))
        return done

    def _chains(self) -> Iterator[list[SampledTurn]]:
        """The turns of each segment."""
        starts = list(self._roots)
        while starts:
            chain = [starts.pop(0)]
            while children := chain[-1].children:
                chain.append(children[0])
            branches = [branch for turn in chain for branch in turn.children[1:]]
            starts = [*branches, *starts]
            yield chain


def count_calls(turns: Sequence[SampledTurn], unknown: str) -> dict[str, dict[str, int]]:
    """`calls`, `errors` and `malformed` of each tool that was called; of errors the gateway knows nothing."""
    counts: dict[str, dict[str, Any]] = {}
    for call in (call for turn in turns for call in turn.parsed.calls):
        of_tool = counts.setdefault(call.name or unknown, {"calls": 0, "errors": 0, "malformed": 0})
        of_tool["calls"] += 1
        of_tool["malformed"] += isinstance(call, MalformedCall)
    return counts
