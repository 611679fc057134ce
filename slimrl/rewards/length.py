"""Costs of length and of repetition, in tokens that the policy sampled, thinking included.

A cost of length alone is `algorithm.overlong` (DAPO's soft overlong punishment).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.loading import NO_SUPPLIES, Supplies
from slimrl.rewards.verifier import OfVerifier


class CosineLength(OfVerifier):
    """The cosine length reward (Yeo et al., arXiv:2502.03373): a right answer is worth more the shorter it
    is, and a wrong one less, so that a policy that is not yet right goes on thinking.

    For L of `max_tokens` tokens, CosFn = last + (first - last) / 2 * (1 + cos(pi * L / max_tokens)) between the values
    of length 0 and of `max_tokens`; at and above `max_tokens` it is `exceed`. `wrong` is not above 0 and its value at
    0 tokens not above that at `max_tokens`, or giving up at once would be worth most.

    Args:
        of, of_args: the verifier, as `function` and `args` in `reward.parts`; 0.5 or more is right.
        right, wrong: values of a right and a wrong answer at 0 and at `max_tokens` tokens.
    """

    def __init__(
        self,
        *,
        of: str,
        max_tokens: int,
        of_args: dict[str, Any] | None = None,
        right: Sequence[float] = (1.0, 0.5),
        wrong: Sequence[float] = (-0.5, 0.0),
        exceed: float = -0.5,
        supplies: Supplies = NO_SUPPLIES,
    ) -> None:
        super().__init__(of, of_args, supplies)
        if max_tokens < 1:
            raise ValueError(f"max_tokens: {max_tokens} is below 1")
        if len(right) != 2 or len(wrong) != 2:
            raise ValueError("right and wrong: give two numbers each, for 0 and for max_tokens tokens")
        if not wrong[0] <= wrong[1] <= 0 <= right[1] <= right[0] or exceed > 0:
            raise ValueError("give wrong[0] <= wrong[1] <= 0 <= right[1] <= right[0], and exceed <= 0")
        self._max_tokens, self._right, self._wrong, self._exceed = max_tokens, right, wrong, exceed

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises what the verifier raises."""
        right = await self.correctness(trajectory, prompt) >= 0.5
        tokens = trajectory.num_sampled_tokens
        if tokens >= self._max_tokens:
            return self._exceed
        first, last = self._right if right else self._wrong
        return last + (first - last) / 2 * (1 + math.cos(math.pi * tokens / self._max_tokens))


class Repetition:
    """Minus the fraction of n-grams of sampled tokens that occurred before: -(1 - different / all), from -1 to 0.

    The n-gram repetition penalty of Yeo et al. (arXiv:2502.03373) as Open-R1 normalises it, over tokens: words
    could be joined to avoid it. N-grams do not cross turns, and their numbers are added over all turns, so a turn that
    says again what an earlier one said pays too.

    Args:
        ngram: n.
    """

    def __init__(self, *, ngram: int = 20) -> None:
        if ngram < 1:
            raise ValueError(f"ngram: {ngram} is below 1")
        self._ngram = ngram

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        grams: list[bytes] = []
        for segment in trajectory.segments:
            mask = np.asarray(segment.loss_mask, bool)
            for turn in np.unique(segment.turn_ids[mask]):
                tokens = np.ascontiguousarray(segment.tokens[mask & (segment.turn_ids == turn)])
                grams += [tokens[at : at + self._ngram].tobytes() for at in range(len(tokens) - self._ngram + 1)]
        return -(1 - len(set(grams)) / len(grams)) if grams else 0.0
