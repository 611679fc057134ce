"""Rewards for answers in \\boxed{}: 1 for the right one, 0 otherwise."""

import logging
import re
from fractions import Fraction

from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.comparers import OutOfCpuTime, shared_comparers
from slimrl.rewards.texts import AnswerPlace

MAX_SYMBOLIC_CHARACTERS = 300
"""A longer answer is not compared symbolically and counts as wrong."""
MAX_DIGITS = 4000
"""A longer answer counts as wrong; Python refuses to convert such a number."""

_BOXED = AnswerPlace("boxed")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_QUOTIENT = re.compile(r"(?P<sign>[+-]?)\\[dt]?frac\{(?P<top>[+-]?\d+)\}\{(?P<bottom>\d+)\}")
_SLASH = re.compile(r"(?P<sign>)(?P<top>[+-]?\d+)/(?P<bottom>\d+)")
_THOUSANDS = re.compile(r"(?<=\d)(,|\{,\}|\\,)(?=\d{3}(\D|$))")

log = logging.getLogger(__name__)


def boxed_exact(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer is the label, as the same number in digits or the same text.

    `\\boxed{2+3}` is wrong for the label 5: a task about computing must not accept the problem as its answer.
    """
    answer = _BOXED.of(trajectory)
    return float(answer is not None and _same(_normalise(answer), _normalise(_label(prompt))) is True)


def boxed_equivalent(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer equals the label mathematically, for example `2\\sqrt{2}` and `\\sqrt{8}`.

    Separate processes compare symbols (comparers.py). An answer whose comparison exceeds the CPU time limit counts as
    wrong and sets `metadata["reward_timed_out"]`, which reward/timeouts counts.

    Raises:
        ComparerFailed: such a process failed; whether the answer is right is unknown.
    """
    answer = _BOXED.of(trajectory)
    if answer is None:
        return 0.0
    label = _label(prompt)
    same = _same(_normalise(answer), _normalise(label))
    if same is not None:
        return float(same)
    if len(answer) > MAX_SYMBOLIC_CHARACTERS:
        return 0.0
    try:
        return float(shared_comparers().equivalent(answer, label))
    except OutOfCpuTime as error:
        log.warning("%s counts as wrong: %s: %r", trajectory.trajectory_id, error, answer)
        trajectory.metadata["reward_timed_out"] = True
        return 0.0


def _label(prompt: Prompt) -> str:
    """Raises ValueError if the label is no final answer; no answer would ever be right."""
    if isinstance(prompt.label, dict | list):
        raise ValueError(f"the label of {prompt.prompt_id} is no number or text, but {str(prompt.label)[:80]}")
    return str(prompt.label)


def _same(answer: str, label: str) -> bool | None:
    """Whether two normalised answers are the same; None if that needs symbolic comparison."""
    if answer == label:
        return True
    if len(answer) > MAX_DIGITS:
        return False
    numbers = _number(answer), _number(label)
    if None in numbers:
        return None
    return numbers[0] == numbers[1]


def _normalise(answer: str) -> str:
    """An answer without white space, dollar signs, thousands separators and a final full stop."""
    text = answer.replace("$", "").replace("\N{MINUS SIGN}", "-")
    text = _THOUSANDS.sub("", re.sub(r"\s+", "", text))
    return text.removesuffix(".")


def _number(normalised: str) -> Fraction | None:
    """The value of a normalised answer that is a decimal number or a quotient of integers; None for anything else."""
    if _NUMBER.fullmatch(normalised):
        return Fraction(normalised)
    match = _QUOTIENT.fullmatch(normalised) or _SLASH.fullmatch(normalised)
    if match is None or int(match["bottom"]) == 0:
        return None
    value = Fraction(int(match["top"]), int(match["bottom"]))
    return -value if match["sign"] == "-" else value
