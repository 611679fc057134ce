"""Rewards for answers in \\boxed{}: 1 for the right one, 0 otherwise."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from math_verify import parse, verify

from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.boxed import final_answer, normalise, number

MAX_SYMBOLIC_CHARACTERS = 300
"""A longer answer is not compared symbolically and counts as wrong."""
SYMBOLIC_TIMEOUT_S = 5.0
MAX_DIGITS = 4000
"""A longer answer is no number that anyone asked for; Python refuses to convert it."""


def boxed_exact(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer is the label, as a number written in digits or as the same text.

    `\\boxed{2+3}` is wrong for the label 5: a task about computing must not accept the problem as its answer.
    """
    answer = final_answer(trajectory)
    return float(answer is not None and _same(normalise(answer), normalise(str(prompt.label))) is True)


def boxed_equivalent(trajectory: Trajectory, prompt: Prompt) -> float:
    """1.0 if the final answer equals the label mathematically, for example `2\\sqrt{2}` and `\\sqrt{8}`.

    An answer that cannot be compared within SYMBOLIC_TIMEOUT_S is wrong.
    """
    answer = final_answer(trajectory)
    if answer is None:
        return 0.0
    same = _same(normalise(answer), normalise(str(prompt.label)))
    if same is not None:
        return float(same)
    if len(answer) > MAX_SYMBOLIC_CHARACTERS:
        return 0.0
    return float(_equivalent(answer, str(prompt.label)))


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


def _equivalent(answer: str, label: str) -> bool:
    def compare() -> bool:
        # math-verify's own deadlines are signals, which only the main thread may set.
        gold = parse(f"\\boxed{{{label}}}", parsing_timeout=None)
        given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        return verify(gold, given, timeout_seconds=None)

    try:
        return call_with_deadline(compare, SYMBOLIC_TIMEOUT_S)
    except TimeoutError:
        return False


class _Expired(BaseException):
    """Raised in a thread whose deadline has passed; no `except Exception` on its way stops it."""


def call_with_deadline(function: Callable[[], Any], timeout_s: float) -> Any:
    """What `function` returns, computed in a thread that is interrupted at the deadline.

    The interruption reaches Python code, at its next instruction; a call into C is interrupted when it returns.

    Raises:
        TimeoutError: no result in time. Whatever the function raises is raised here.
    """
    outcome: list[Any] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(function())
        except _Expired:
            return
        except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="slimrl-deadline", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Expired))
        raise TimeoutError(f"no result within {timeout_s:g} s")
    if failure:
        raise failure[0]
    return outcome[0]
