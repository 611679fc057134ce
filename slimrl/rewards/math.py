"""Rewards for answers in \\boxed{}: 1 for the right one, 0 otherwise."""

import logging

from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.boxed import final_answer, normalise, number
from slimrl.rewards.comparers import OutOfCpuTime, shared_comparers

MAX_SYMBOLIC_CHARACTERS = 300
"""A longer answer is not compared symbolically and counts as wrong."""
MAX_DIGITS = 4000
"""A longer answer is no number that anyone asked for; Python refuses to convert it."""

log = logging.getLogger(__name__)


def boxed_exact(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer is the label, as a number written in digits or as the same text.

    `\\boxed{2+3}` is wrong for the label 5: a task about computing must not accept the problem as its answer.
    """
    answer = final_answer(trajectory)
    return float(answer is not None and _same(normalise(answer), normalise(str(prompt.label))) is True)


def boxed_equivalent(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer equals the label mathematically, for example `2\\sqrt{2}` and `\\sqrt{8}`.

    Symbols are compared in processes of their own (comparers.py). An answer whose comparison takes more CPU time than
    it may is wrong, and sets `metadata["reward_timed_out"]`, which reward/timeouts counts.

    Raises:
        ComparerFailed: such a process failed, which says nothing about the answer.
    """
    answer = final_answer(trajectory)
    if answer is None:
        return 0.0
    same = _same(normalise(answer), normalise(str(prompt.label)))
    if same is not None:
        return float(same)
    if len(answer) > MAX_SYMBOLIC_CHARACTERS:
        return 0.0
    try:
        return float(shared_comparers().equivalent(answer, str(prompt.label)))
    except OutOfCpuTime as error:
        log.warning("%s counts as wrong: %s: %r", trajectory.trajectory_id, error, answer)
        trajectory.metadata["reward_timed_out"] = True
        return 0.0


def _same(answer: str, label: str) -> bool | None:
    """Whether two normalised answers are the same; None where that takes symbolic comparison."""
    if answer == label:
        return True
    if len(answer) > MAX_DIGITS:
        return False
    numbers = number(answer), number(label)
    if None in numbers:
        return None
    return numbers[0] == numbers[1]
