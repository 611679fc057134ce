"""Rewards for answers in words: exact match and F1, as question answering is scored.

Texts are compared in SQuAD's normal form (Rajpurkar et al., arXiv:1606.05250, evaluate-v1.1): lower case, without
punctuation and the words a, an and the. The label is a text, a number, or a list of them, of which the best counts.
"""

import re
import string
from collections import Counter

from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.texts import AnswerPlace

CLOSED = {"yes", "no", "noanswer"}
"""Answers that share no words with others (HotpotQA, arXiv:1809.09600)."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class ExactMatch:
    """1.0 if the answer is one of the labels in normal form, else 0.0."""

    def __init__(self, *, answer_in: str = "text") -> None:
        self._place = AnswerPlace(answer_in)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError for a label that no answer could match."""
        labels = label_texts(prompt)
        answer = normal_form(self._place.of(trajectory) or "")
        return float(answer in map(normal_form, labels))


class F1:
    """Harmonic mean of the precision and recall of the answer's words, to a power, from 0 to 1.

    Args:
        power: 1 is the F1 of SQuAD and HotpotQA, which pays 0.67 for naming two candidates of which one is right, more
            than the 0.5 of guessing one. With 2 no list of equally likely answers pays more than one of them.
    """

    def __init__(self, *, answer_in: str = "text", power: float = 2.0) -> None:
        if not 1 <= power <= 10:
            raise ValueError(f"power: {power:g} is not between 1 and 10")
        self._place, self._power = AnswerPlace(answer_in), power

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError for a label that no answer could match."""
        labels = label_texts(prompt)
        answer = self._place.of(trajectory) or ""
        return max(word_f1(answer, label) for label in labels) ** self._power


def label_texts(prompt: Prompt) -> list[str]:
    """The labels of a prompt; raises ValueError if there is none, or one of them is no number or not-empty text."""
    given = prompt.label if isinstance(prompt.label, list) else [prompt.label]
    for label in given:
        if isinstance(label, bool) or not isinstance(label, str | int | float) or not str(label).strip():
            raise ValueError(
                f"the label of {prompt.prompt_id} has {label!r}; it must be a text, a number or their list"
            )
    if not given:
        raise ValueError(f"the label of {prompt.prompt_id} is an empty list")
    return [str(label) for label in given]


def normal_form(text: str) -> str:
    """SQuAD's normal form. A text of which it would leave nothing, such as the letter A, is only in lower case."""
    lowered = text.lower().strip()
    words = _ARTICLES.sub(" ", lowered.translate(_PUNCTUATION)).split()
    return " ".join(words) or lowered


def word_f1(answer: str, label: str) -> float:
    """F1 of the words of an answer against those of a label, each as often as it occurs."""
    answer, label = normal_form(answer), normal_form(label)
    if answer != label and CLOSED & {answer, label}:
        return 0.0
    ours, theirs = answer.split(), label.split()
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0
