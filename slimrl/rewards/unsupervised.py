"""Rewards without labels: agreement within the group, and the policy's confidence in its own tokens.

Both make a policy surer of what it already says, right or wrong, and both collapse if they are all there is. Evaluate
on labels, and stop when that falls.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.answers import normal_form
from slimrl.rewards.texts import AnswerPlace, last_text

MAX_CHARACTERS = 300
"""A longer answer has no vote: it is none that two would give alike."""


class SelfConsistency:
    """A reward of groups: 1.0 for the answer that most of a prompt's trajectories give, 0.0 for others.

    This is the majority vote of TTRL (arXiv:2504.16084, eq. 2). Answers are compared in normal form (answers.py). A
    missing one has no vote. Where two answers have the most votes, or the most is one vote, there is no majority and
    all get 0.
    """

    def __init__(self, *, answer_in: str = "boxed") -> None:
        self._place = AnswerPlace(answer_in)

    def __call__(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> list[float]:
        found = [self._place.of(trajectory) or "" for trajectory in trajectories]
        answers = [normal_form(answer) if len(answer) <= MAX_CHARACTERS else "" for answer in found]
        votes = Counter(answer for answer in answers if answer).most_common(2)
        numbers = [number for _, number in votes] + [1]
        if numbers[0] <= numbers[1]:
            return [0.0] * len(answers)
        return [float(answer == votes[0][0]) for answer in answers]


class Confidence:
    """exp of the mean log-prob of the tokens that the policy sampled, from 0 to 1: their geometric mean probability.

    It is the inverse of perplexity, and stands for the entropy that RENT minimises (arXiv:2505.22660); the recorded
    log-probs are of the sampled tokens alone. A token that ends a repetition, `ngram` tokens that were sampled before,
    does not count: a policy is nearly certain of what it repeats. A trajectory without an answer gets 0.

    Args:
        ngram: length of a repetition in tokens.
    """

    def __init__(self, *, ngram: int = 8) -> None:
        if ngram < 2:
            raise ValueError(f"ngram: {ngram} is less than 2")
        self._ngram = ngram

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        if not (last_text(trajectory) or "").strip():
            return 0.0
        sampled = [np.asarray(segment.loss_mask, bool) for segment in trajectory.segments]
        tokens = [segment.tokens[mask] for segment, mask in zip(trajectory.segments, sampled, strict=True)]
        logprobs = [segment.rollout_logprobs[mask] for segment, mask in zip(trajectory.segments, sampled, strict=True)]
        if not sum(map(len, tokens)):
            return 0.0
        new = first_time(np.concatenate(tokens), self._ngram)
        return math.exp(float(np.concatenate(logprobs)[new].mean(dtype=np.float64)))


def first_time(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """Bool [T]: whether the `ngram` tokens that end here occur for the first time; true for the first tokens."""
    seen: set[bytes] = set()
    new = np.ones(len(tokens), bool)
    given = np.ascontiguousarray(tokens)
    for end in range(ngram, len(given) + 1):
        window = given[end - ngram : end].tobytes()
        new[end - 1] = window not in seen
        seen.add(window)
    return new
