"""Tasks that code answers: expressions of whole numbers, `+ - * /` and parentheses, with an exact value."""

import re

from slimrl.agent.calculator import exact_value
from slimrl.agent.tools import ToolError

MAX_CHARACTERS = 100
MAX_DIGITS = 6
"""Longest number in an expression"""
_SIGNS = re.compile(r"[\d+\-*/() ]+", re.ASCII)
_OTHER = re.compile(rf"\*\*|//|\d{{{MAX_DIGITS + 1}}}", re.ASCII)
"""Powers, whole quotients and numbers that are too long"""
_OPERATION = re.compile(r"[\d)] *[+\-*/]", re.ASCII)


def answer_of(task: str) -> str | None:
    """The value of an expression with one operation or more, as a whole number or as `7/2`; None if it is none."""
    if len(task) > MAX_CHARACTERS or not _SIGNS.fullmatch(task) or _OTHER.search(task) or not _OPERATION.search(task):
        return None
    try:
        return str(exact_value(task))
    except ToolError:
        return None
