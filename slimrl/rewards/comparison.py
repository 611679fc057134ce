"""Symbolic comparison of two answers, run in processes of their own by limited_program.py. Imports nothing of slimrl.

A comparison that needs more memory than its process may have ends in a MemoryError, which sympy or math-verify may take
for a form that they do not know: the answers are not equal then.
"""

import re
from dataclasses import replace
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr

MAX_RELATIVE_DIFFERENCE = 1e-6
"""The largest difference of two numbers that are equal. math-verify rounds to 6 places, with which all numbers below
1e-7 would be equal."""

_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False)
"""math-verify's own, but for units: it would drop letters such as m and t from the end, of `3m` and of `2ab`."""

WARM_UP = ["2\\sqrt{2}", "\\sqrt{8}"]
"""The first request to a process"""

_DROPPED = ("'", '"', "...", r"\ldots")
"""Marks that math-verify removes from an answer, though they change what it says."""

_COMMAND = re.compile(r"\\[A-Za-z]+")
_CAPITAL = re.compile(r"\\mathbb ?\{[A-Z]\}|\\[A-Za-z]+|[A-Z]")
"""A capital, or a LaTeX command, which is one thing even where it contains capitals"""
_GREEK = [
    rf"\{name} "
    for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
                 "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega")
]  # fmt: skip


def equivalent(answer: str, label: str) -> bool:
    """Whether two answers, in LaTeX as within \\boxed{}, are mathematically equal. May take arbitrarily long."""
    if any(answer.count(mark) != label.count(mark) for mark in _DROPPED):
        return False
    answer, label = _with_cases(answer, label)
    gold, given = _parsed(label), _parsed(answer)
    # math-verify's own limit is of wall-clock time.
    same = verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and _same_size(gold, given)


def _with_cases(answer: str, label: str) -> list[str]:
    """Both texts, with each capital replaced by an unused Greek letter if its small letter occurs too, since
    math-verify takes R for r."""
    letters = set(_COMMAND.sub("", answer + label))
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    spare = [letter for letter in _GREEK if letter.strip() not in answer + label]
    names = dict(zip(capitals, spare, strict=False))
    return [_CAPITAL.sub(lambda found: names.get(found[0], found[0]), text) for text in (answer, label)]


def _parsed(answer: str) -> list[Any]:
    """What math-verify makes of the whole answer; by default it takes the last number of one that it cannot read."""
    whole = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]
    return parse(f"\\boxed{{{answer}}}", whole, fallback_mode="no_fallback", parsing_timeout=None)


def _same_size(gold: list[Any], given: list[Any]) -> bool:
    """Whether two numbers are near each other in relation to their size; true if they are no numbers."""
    first, second = gold[0], given[0]
    if not (isinstance(first, Expr) and isinstance(second, Expr) and first.is_number and second.is_number):
        return True
    difference = abs(second - first)
    # False also where terms cancel so far that no digit of the difference is known, and for infinities.
    if not difference.is_comparable:
        return True
    return bool(difference.evalf() <= MAX_RELATIVE_DIFFERENCE * abs(first).evalf())


def answer(request: list[str]) -> bool:
    """Whether the two texts of a request are equal, for limited_program.py."""
    try:
        return equivalent(*request)
    except MemoryError:
        return False
