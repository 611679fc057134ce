"""Collects the tokens of one trajectory into a Segment."""

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.data.engine import GenerateResult
from slimrl.data.trajectory import Segment


@dataclass(frozen=True, slots=True)
class _Span:
    """What tokens that were appended at once have in common."""

    length: int
    sampled: bool
    turn: int


class Transcript:
    """Token ids of prompt, sampled turns and tool results in order. Tokens are only ever appended.

    Args:
        num_turns: assistant turns before this segment.
        experts: of the first prompt tokens, where another segment has them already.
    """

    def __init__(self, prompt_tokens: list[int], num_turns: int = 0, experts: Sequence[np.ndarray] = ()) -> None:
        self.tokens: list[int] = list(prompt_tokens)
        # Lists with an entry for each token would cost the garbage collector a third of an episode's CPU time.
        self._logprobs = array("f", bytes(4 * len(prompt_tokens)))
        self._versions = [np.full(len(prompt_tokens), -1, np.int32)]
        self._spans = [_Span(len(prompt_tokens), sampled=False, turn=-1)]
        self._experts = list(experts)
        self.num_turns = num_turns
        """Number of assistant turns so far."""

    @property
    def num_expert_rows(self) -> int:
        """Tokens whose experts are known, the first ones. A token's first pass is the one that counts: it sampled the
        token after it."""
        return sum(map(len, self._experts))

    def copy(self) -> "Transcript":
        """Another one with the same tokens."""
        other = copy.copy(self)
        other.tokens, other._logprobs = [*self.tokens], self._logprobs[:]
        other._versions, other._spans, other._experts = [*self._versions], [*self._spans], [*self._experts]
        return other

    def add_turn(self, result: GenerateResult, *, goes_on: bool = False) -> None:
        """Append what the policy sampled in reply to all tokens so far, and the experts of tokens that had none yet.

        Args:
            goes_on: it belongs to the last turn, which may have begun in an earlier segment.
        """
        self.num_turns += not goes_on
        count = len(result.tokens)
        assert len(result.logprobs) == len(result.weight_versions) == count, "one of each per sampled token"
        span = _Span(count, sampled=True, turn=self.num_turns - 1)
        self._append(result.tokens, result.logprobs, result.weight_versions, span)
        if (experts_TLK := result.routed_experts) is not None:
            assert self.num_expert_rows + len(experts_TLK) <= len(self.tokens), "more rows of experts than tokens"
            self._experts.append(experts_TLK.astype(np.int16, copy=False))

    def add_tool_results(self, tokens: list[int]) -> None:
        """Append the answers to the last turn."""
        span = _Span(len(tokens), sampled=False, turn=self.num_turns - 1)
        self._append(tokens, [0.0] * len(tokens), np.full(len(tokens), -1, np.int32), span)

    def segment(self) -> Segment:
        """The segment of all tokens so far."""
        experts = None
        if self._experts:
            missing = len(self.tokens) - self.num_expert_rows
            experts = np.concatenate([*self._experts, np.full((missing, *self._experts[0].shape[1:]), -1, np.int16)])
        lengths = [span.length for span in self._spans]

        def spread(values: list[int], kind: type) -> np.ndarray:
            return np.repeat(np.array(values, kind), lengths)

        return Segment(
            tokens=np.array(self.tokens, np.int32),
            loss_mask=spread([span.sampled for span in self._spans], np.bool_),
            rollout_logprobs=np.array(self._logprobs, np.float32),
            weight_versions=np.concatenate(self._versions),
            turn_ids=spread([span.turn for span in self._spans], np.int16),
            routed_experts=experts,
        )

    def _append(self, tokens: list[int], logprobs: list[float], versions: np.ndarray, span: _Span) -> None:
        self.tokens += tokens
        self._logprobs.extend(logprobs)
        self._versions.append(versions)
        self._spans.append(span)
