"""The tokens of one trajectory as they come in, and the Segment that they make."""

import numpy as np

from slimrl.data.protocols import GenerateResult
from slimrl.data.trajectory import Segment


class Transcript:
    """Prompt, sampled turns and tool results in order, as token ids that are never changed again."""

    def __init__(self, prompt_tokens: list[int]) -> None:
        self.tokens: list[int] = list(prompt_tokens)
        self._mask: list[bool] = [False] * len(prompt_tokens)
        self._logprobs: list[float] = [0.0] * len(prompt_tokens)
        self._versions: list[int] = [-1] * len(prompt_tokens)
        self._turns: list[int] = [-1] * len(prompt_tokens)
        self._experts: list[np.ndarray] = []
        self._num_expert_rows = 0
        self.num_turns = 0
        """Assistant turns so far."""

    def add_turn(self, result: GenerateResult) -> None:
        """Append what the policy sampled in reply to all tokens so far."""
        count = len(result.tokens)
        assert len(result.logprobs) == count, "one log-prob per sampled token"
        self._append(
            result.tokens, mask=True, logprobs=result.logprobs, version=result.weight_version, turn=self.num_turns
        )
        self.num_turns += 1
        self._add_experts(result.routed_experts)

    def add_tool_results(self, tokens: list[int]) -> None:
        """Append what answers the turn that was added last."""
        self._append(tokens, mask=False, logprobs=[0.0] * len(tokens), version=-1, turn=self.num_turns - 1)

    def segment(self) -> Segment:
        """Everything so far."""
        return Segment(
            tokens=np.array(self.tokens, np.int32),
            loss_mask=np.array(self._mask, np.bool_),
            rollout_logprobs=np.array(self._logprobs, np.float32),
            weight_versions=np.array(self._versions, np.int32),
            turn_ids=np.array(self._turns, np.int16),
            routed_experts=self._all_experts(),
        )

    def _append(self, tokens: list[int], *, mask: bool, logprobs: list[float], version: int, turn: int) -> None:
        count = len(tokens)
        self.tokens += tokens
        self._mask += [mask] * count
        self._logprobs += logprobs
        self._versions += [version] * count
        self._turns += [turn] * count

    def _add_experts(self, experts_TLK: np.ndarray | None) -> None:
        """Keep the rows that no earlier turn gave: a token's first pass is the one that sampled what follows it."""
        if experts_TLK is None:
            return
        assert len(experts_TLK) <= len(self.tokens), "more rows of experts than tokens"
        new = experts_TLK[self._num_expert_rows :]
        self._experts.append(new.astype(np.int16))
        self._num_expert_rows += len(new)

    def _all_experts(self) -> np.ndarray | None:
        if not self._experts:
            return None
        missing = len(self.tokens) - self._num_expert_rows
        shape = self._experts[0].shape[1:]
        return np.concatenate([*self._experts, np.full((missing, *shape), -1, np.int16)])
