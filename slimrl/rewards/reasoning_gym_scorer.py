"""The scorers of reasoning-gym, run in processes of their own by limited_program.py. Imports nothing of slimrl.

An entry comes from a prompt file and so from JSON, and an answer from the policy:

- A tuple that a scorer compares with is a list in JSON, and made one again here.
- Some scorers give an answer to `eval`, or to sympy's `parse_expr`, which evaluates it. There it could run any code, or
  simply name the right answer: here the first take literals of Python, the others arithmetic and functions of
  mathematics.
- A scorer that raises could make nothing of the answer, which is wrong then. That the entry itself is whole is known:
  `slimrl-tools prepare` and the reading of the data score the entry's own answer.
"""

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

WARM_UP = ["chain_sum", {"answer": "3", "metadata": {}}, "3"]
"""The first request to a process"""

BOARDS = {"arc_agi", "rearc"}
"""Tasks whose scorer compares with a board, which is a tuple of tuples"""
EVALUATING = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Tasks whose scorer gives the answer to `eval`, where a list in Python's form is right too"""
SYMBOLIC = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
"""Tasks whose scorer gives the answer to sympy"""
ARITHMETIC = {"countdown", "puzzle24"}
"""Tasks among these with given numbers, where a letter could be a further one: sympy knows E and pi"""
_FUNCTIONS = {"pi", "exp", "log", "ln", "sqrt", "abs", "Abs", "erf"} | {
    f"{inverse}{name}{hyperbolic}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for inverse in ("", "a")
    for hyperbolic in ("", "h")
}
_NAME = re.compile(r"[^\W\d]\w*")
_ARITHMETIC = re.compile(r"[0-9\s.+\-*/()]*")
_FORMULA = re.compile(r"[\w\s.,+\-*/^()=]*")


def answer(request: list[Any]) -> float:
    """The score, from 0 to 1, of a request: a task, its entry and the policy's answer.

    Raises:
        ValueError: there is no such task.
    """
    task, entry, text = request
    scorer = _scorer(task)
    if task in ARITHMETIC and not _ARITHMETIC.fullmatch(text):
        return 0.0
    if task in SYMBOLIC and not _is_formula(text):
        return 0.0
    if task in BOARDS:
        board = tuple(map(tuple, entry["metadata"]["output"]))
        entry = {**entry, "metadata": {**entry["metadata"], "output": board}}
    try:
        score = scorer(answer=text, entry=entry)
    except Exception:  # noqa: BLE001 - whatever the library raises, it could make nothing of the policy's text
        return 0.0
    return float(score)


@cache
def _scorer(task: str) -> Callable[..., Any]:
    # This makes the task's data set, which for some tasks reads a file.
    scorer: Callable[..., Any] = reasoning_gym.get_score_answer_fn(task)
    if task in EVALUATING:
        # A module's own name comes before Python's.
        vars(sys.modules[type(scorer.__self__).__module__])["eval"] = ast.literal_eval  # type: ignore[attr-defined]
    return scorer


def _is_formula(text: str) -> bool:
    """Whether a text is arithmetic of numbers, variables of one letter and known functions."""
    names = _NAME.findall(text)
    return bool(_FORMULA.fullmatch(text)) and all(len(name) == 1 or name in _FUNCTIONS for name in names)
