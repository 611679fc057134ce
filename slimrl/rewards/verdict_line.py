"""Forms of a judge's verdict: the last line of its answer, alone, in the spellings that judges write.

Accepted are any case, the marks of Markdown, a scale (`7/10`) if it is the asked one, and a full stop. A line with
anything else, such as a second number, a quotation or a reason, is no verdict: a policy may have caused it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_MARKS = str.maketrans("", "", "*_`#~")
"""Marks of Markdown; not `>`, which begins a quotation."""
_IS = r" *[:=\uff1a] *"
_SCORE = re.compile(
    rf"(?:(?:final|overall|total) )?score{_IS}"
    r"(\[{0,2})(\d{1,3}(?:\.\d{1,3})?)(\]{0,2})(?: *(?:/|out of) *(\d{1,3}))?\.?",
    re.ASCII | re.IGNORECASE,
)
_BETTER = re.compile(rf"better{_IS}(?:(?:text )?(a|b)|(tie))\.?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VerdictForm[V: float | str]:
    wanted: str
    """Description of the form that the last line must have, for the judge"""
    read: Callable[[str], V | None]
    """Function that gives the verdict in a line; None if the line has none"""


def last_line(answer: str) -> str:
    """The last line that says something, without marks of Markdown."""
    lines = (line.translate(_MARKS).strip() for line in answer.splitlines())
    said = [line for line in lines if line.strip("- ")]
    return said[-1] if said else ""


def score_form(highest: int) -> VerdictForm[float]:
    """A number from 0 to `highest`."""

    def read(line: str) -> float | None:
        found = _SCORE.fullmatch(line)
        if found is None or len(found[1]) != len(found[3]) or int(found[4] or highest) != highest:
            return None
        score = float(found[2])
        return score if score <= highest else None

    return VerdictForm(wanted=f"`SCORE: ` and a number from 0 to {highest}, and nothing else", read=read)


def _better(line: str) -> str | None:
    found = _BETTER.fullmatch(line)
    return None if found is None else (found[1] or found[2]).upper()


BETTER = VerdictForm(wanted="`BETTER: A`, `BETTER: B` or `BETTER: TIE`, and nothing else", read=_better)
"""Form of a comparison, whose verdict is `A`, `B` or `TIE`"""
