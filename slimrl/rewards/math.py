"""Rewards for answers in \\boxed{}: 1 for the right one, 0 otherwise.

equality.py decides most kinds of answers exactly, and says which pairs of expressions are to be compared symbolically.
"""

import logging
import re

from slimrl.base.answering_process import OutOfCpuTime
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.comparers import shared_comparers
from slimrl.rewards.equality import Ask, is_label
from slimrl.rewards.labels import checked_by, only_label
from slimrl.rewards.latex import plain
from slimrl.rewards.numerals import MAX_DIGITS
from slimrl.rewards.texts import BOX, AnswerPlace

MAX_SYMBOLIC_CHARACTERS = 300
"""A longer expression is not compared symbolically and counts as wrong."""

MOST_WORDS = 50
"""Most words of a label; the longest answers of published sets are lists of names, or a sentence."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
"""Neither a command of LaTeX nor letters of a formula"""

_BOXED = AnswerPlace("boxed")

log = logging.getLogger(__name__)


def final_answer(prompt: Prompt) -> str:
    """The label as text. Raises ValueError if it is none that a box could hold."""
    label = only_label(prompt)
    if BOX in label:
        raise ValueError(f"the label of {prompt.prompt_id}: it is a box; write what stands in it")
    if len(_WORD.findall(label)) > MOST_WORDS:
        raise ValueError(
            f"the label of {prompt.prompt_id}: it has more than {MOST_WORDS} words, and so is a solution or a text; "
            "name the column that has the final answer alone"
        )
    if not re.search(r"\w|\\", plain(label), re.ASCII):
        raise ValueError(f"the label of {prompt.prompt_id}: {label!r} has no letter, digit or sign of mathematics")
    return label


@checked_by(final_answer)
def boxed_exact(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer is the label, as the same number in digits or the same text.

    `\\boxed{2+3}` is wrong for the label 5: a task about computing must not accept the problem as its answer.

    Raises:
        ValueError: the label is no final answer.
    """
    return _reward(trajectory, prompt, lambda answer, label: False)


@checked_by(final_answer)
def boxed_equivalent(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer equals the label mathematically, for example `2\\sqrt{2}` and `\\sqrt{8}`.

    Separate processes compare symbols (comparers.py). An answer whose comparison exceeds the CPU time limit counts as
    wrong and sets `metadata["reward_timed_out"]`, which reward/timeouts counts.

    Raises:
        ValueError: the label is no final answer.
        ProcessFailed: such a process failed; whether the answer is right is unknown.
    """
    try:
        return _reward(trajectory, prompt, _equivalent)
    except OutOfCpuTime as error:
        log.warning("%s counts as wrong: %s: %r", trajectory.trajectory_id, error, _BOXED.of(trajectory))
        trajectory.metadata["reward_timed_out"] = True
        return 0.0


def _reward(trajectory: Trajectory, prompt: Prompt, ask: Ask) -> float:
    label = final_answer(prompt)
    answer = _BOXED.of(trajectory)
    return float(answer is not None and len(answer) <= MAX_DIGITS and is_label(answer, label, ask))


def _equivalent(answer: str, label: str) -> bool:
    return len(answer) <= MAX_SYMBOLIC_CHARACTERS and shared_comparers().equivalent(answer, label)
