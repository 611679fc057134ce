"""Collects the tokens of one trajectory into a Segment."""

from collections.abc import Sequence

import numpy as np

from slimrl.data.engine import GenerateResult
from slimrl.data.trajectory import Segment


class Transcript:
    """Token ids of prompt, sampled turns and tool results in order. Tokens are only ever appended.

    Args:
        num_turns: assistant turns before this segment.
        experts: of the first prompt tokens, where another segment has them already.
    """

    def __init__(self, prompt_tokens: list[int], num_turns: int = 0, experts: Sequence[np.ndarray] = ()) -> None:
        self.tokens: list[int] = list(prompt_tokens)
        self._mask: list[bool] = [False] * len(prompt_tokens)
        self._logprobs: list[float] = [0.0] * len(prompt_tokens)
        self._versions: list[int] = [-1] * len(prompt_tokens)
        self._turns: list[int] = [-1] * len(prompt_tokens)
        self._experts = list(experts)
        self.num_turns = num_turns
        """Assistant turns so far."""

    @property
    def num_expert_rows(self) -> int:
        """Tokens whose experts are known, the first ones. A token's first pass is the one that counts: it sampled the
        token after it."""
        return sum(map(len, self._experts))

    def add_turn(self, result: GenerateResult, *, goes_on: bool = False) -> None:
        """Append what the policy sampled in reply to all tokens so far, and the experts of tokens that had none yet.

        Args:
            goes_on: it belongs to the last turn.
        """
        self.num_turns += not goes_on
        count = len(result.tokens)
        assert len(result.logprobs) == count, "one log-prob per sampled token"
        self._append(
            result.tokens, mask=True, logprobs=result.logprobs, version=result.weight_version, turn=self.num_turns - 1
        )
        if (experts_TLK := result.routed_experts) is not None:
            assert self.num_expert_rows + len(experts_TLK) <= len(self.tokens), "more rows of experts than tokens"
            self._experts.append(experts_TLK.astype(np.int16, copy=False))

    def add_tool_results(self, tokens: list[int]) -> None:
        """Append the answers to the last turn."""
        self._append(tokens, mask=False, logprobs=[0.0] * len(tokens), version=-1, turn=self.num_turns - 1)

    def segment(self) -> Segment:
        """All tokens so far."""
        experts = None
        if self._experts:
            missing = len(self.tokens) - self.num_expert_rows
            experts = np.concatenate([*self._experts, np.full((missing, *self._experts[0].shape[1:]), -1, np.int16)])
        return Segment(
            tokens=np.array(self.tokens, np.int32),
            loss_mask=np.array(self._mask, np.bool_),
            rollout_logprobs=np.array(self._logprobs, np.float32),
            weight_versions=np.array(self._versions, np.int32),
            turn_ids=np.array(self._turns, np.int16),
            routed_experts=experts,
        )

    def _append(self, tokens: list[int], *, mask: bool, logprobs: list[float], version: int, turn: int) -> None:
        count = len(tokens)
        self.tokens += tokens
        self._mask += [mask] * count
        self._logprobs += logprobs
        self._versions += [version] * count
        self._turns += [turn] * count
