"""Rewards without labels: agreement within the group, and the policy's confidence in its own tokens.

Both make a policy surer of what it already says, right or wrong, and both collapse if they are all there is. Evaluate
on labels, and stop when that falls.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.answers import normal_form
from slimrl.rewards.texts import AnswerPlace, last_text

MAX_CHARACTERS = 300
"""A longer answer has no vote: it is none that two would give alike."""


class SelfConsistency:
    """A reward of groups: 1.0 for the answer that most of a prompt's trajectories give, 0.0 for others.

    This is the majority vote of TTRL (arXiv:2504.16084). Answers are compared in normal form (answers.py). A
    missing one has no vote. Where two answers have the most votes, or the most is one vote, there is no majority and
    all get 0.
    """

    def __init__(self, *, answer_in: str = "boxed") -> None:
        self._place = AnswerPlace(answer_in)

    def __call__(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> list[float]:
        found = [self._place.of(trajectory) or "" for trajectory in trajectories]
        answers = [normal_form(answer) if len(answer) <= MAX_CHARACTERS else "" for answer in found]
        votes = Counter(answer for answer in answers if answer)
        most = max(votes.values(), default=0)
        winners = [answer for answer, number in votes.items() if number == most > 1]
        return [float(len(winners) == 1 and answer == winners[0]) for answer in answers]


class Confidence:
    """exp of the mean log-prob of the tokens that the policy sampled, from 0 to 1: their geometric mean probability.

    It is the inverse of perplexity, and stands for the entropy that RENT minimises (arXiv:2505.22660): log-probs are
    recorded of the sampled tokens alone. Tokens of a repetition, `ngram` tokens or more that were sampled before, do
    not count, since a policy is nearly certain of what it repeats. A trajectory without an answer gets 0.

    Args:
        ngram: least length of a repetition in tokens.
    """

    def __init__(self, *, ngram: int = 4) -> None:
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
        new = not_repeated(np.concatenate(tokens), self._ngram)
        return math.exp(float(np.concatenate(logprobs)[new].mean(dtype=np.float64)))


def not_repeated(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """Bool [T]: false for tokens in a run of `ngram` tokens that occurred before; true at least for the first token."""
    seen: set[bytes] = set()
    new = np.ones(len(tokens), bool)
    given = np.ascontiguousarray(tokens)
    for end in range(ngram, len(given) + 1):
        window = given[end - ngram : end].tobytes()
        if window in seen:
            new[end - ngram : end] = False
        seen.add(window)
    return new
