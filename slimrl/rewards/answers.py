"""Rewards for answers in words: exact match and F1, as question answering is scored.

Numbers are compared as numbers and letters of choices as letters (kinds.py). Other texts are compared in SQuAD's normal
form (Rajpurkar et al., arXiv:1606.05250, evaluate-v1.1): lower case, without punctuation and the words a, an and the.
Other than there, punctuation stays where it says something: the sign and point of a number, what is between two digits,
and what ends a word such as C++ or C#; and an a after which nothing comes is a letter. Full-width characters and dashes
are those of ASCII.

The label is a text, a number, or a list of them, of which the best counts.
"""

import re
import string
from collections import Counter

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.equality import same_choice
from slimrl.rewards.kinds import Choice, Quantity, read
from slimrl.rewards.labels import label_list
from slimrl.rewards.latex import plain
from slimrl.rewards.numerals import MAX_DIGITS
from slimrl.rewards.texts import AnswerPlace

CLOSED = {"yes", "no", "noanswer"}
"""Answers that share no words with others (HotpotQA, arXiv:1809.09600)."""
_PUNCTUATION = re.escape(string.punctuation)
_SAYS_SOMETHING = re.compile(
    rf"""(?<=\d) [{_PUNCTUATION}] (?=\d)              # 1.5, 3/4, 10:30
      |  (?<![\w{_PUNCTUATION}]) [-+.]+ (?=\d)        # -5, .5
      |  (?<=[^\W_]) [-+\#]+ (?!\w)                   # C++, C#, O-""",
    re.VERBOSE,
)
_REMOVED = str.maketrans("", "", string.punctuation)
_ASCII = dict(zip(range(0xFF01, 0xFF5F), range(0x21, 0x7F), strict=True)) | dict.fromkeys(
    [*range(ord("\N{HYPHEN}"), ord("\N{EN DASH}") + 1), ord("\N{MINUS SIGN}")], "-"
)
"""Full-width characters of East Asian texts, and hyphens and dashes within words and between numbers"""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ARTICLES = re.compile(r"\b(a|an|the)\s+(?=\S)")


class ExactMatch:
    """1.0 if the answer is one of the labels in normal form, else 0.0."""

    def __init__(self, *, answer_in: str = "text") -> None:
        self._place = AnswerPlace(answer_in)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError for a label that no answer could match."""
        label_list(prompt)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError for a label that no answer could match."""
        labels = label_list(prompt)
        answer = self._place.of(trajectory) or ""
        return float(any(same_words(answer, label) for label in labels))


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

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError for a label that no answer could match."""
        label_list(prompt)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Raises ValueError for a label that no answer could match."""
        labels = label_list(prompt)
        answer = self._place.of(trajectory) or ""
        return max(word_f1(answer, label) for label in labels) ** self._power


def same_words(answer: str, label: str) -> bool:
    """Whether an answer in words is the label: the same number, the same choice, or the same in normal form."""
    if normal_form(answer) == normal_form(label):
        return True
    if len(answer) > MAX_DIGITS:
        return False
    given, wanted = read(plain(answer)), read(plain(label))
    if isinstance(given, Quantity) and isinstance(wanted, Quantity):
        return given.value is not None and (given.value, given.unit) == (wanted.value, wanted.unit)
    return isinstance(given, Choice) and isinstance(wanted, Choice) and same_choice(given, wanted)


def normal_form(text: str) -> str:
    """SQuAD's normal form, but for punctuation that says something. A text of which it would leave nothing is only in
    lower case."""
    lowered = _THOUSANDS.sub("", text.translate(_ASCII).lower().strip())
    kept, begin = [], 0
    for found in _SAYS_SOMETHING.finditer(lowered):
        kept += [lowered[begin : found.start()].translate(_REMOVED), found[0]]
        begin = found.end()
    kept.append(lowered[begin:].translate(_REMOVED))
    words = _ARTICLES.sub("", "".join(kept)).split()
    return " ".join(words) or lowered


def word_f1(answer: str, label: str) -> float:
    """F1 of the words of an answer against those of a label, each as often as it occurs."""
    if same_words(answer, label):
        return 1.0
    answer, label = normal_form(answer), normal_form(label)
    if CLOSED & {answer, label}:
        return 0.0
    ours, theirs = answer.split(), label.split()
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0
