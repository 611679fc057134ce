"""Finds the answer that a model put in \\boxed{} and brings it into a form that can be compared."""

import re
from fractions import Fraction

from slimrl.data.trajectory import Trajectory

_BOX = "\\boxed{"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_QUOTIENT = re.compile(r"(?P<sign>[+-]?)\\[dt]?frac\{(?P<top>[+-]?\d+)\}\{(?P<bottom>\d+)\}")
_SLASH = re.compile(r"(?P<sign>)(?P<top>[+-]?\d+)/(?P<bottom>\d+)")
_THOUSANDS = re.compile(r"(?<=\d)(,|\{,\}|\\,)(?=\d{3}(\D|$))")


def final_answer(trajectory: Trajectory) -> str | None:
    """What the last \\boxed{} of the final assistant message holds; None where the last message is not the model's."""
    if not trajectory.messages or trajectory.messages[-1]["role"] != "assistant":
        return None
    return last_boxed(trajectory.messages[-1]["content"] or "")


def last_boxed(text: str) -> str | None:
    """What the last closed \\boxed{} of a text holds; None where there is none. Braces inside are matched."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth = 1
        begin = start + len(_BOX)
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position]
        start = text.rfind(_BOX, 0, start)
    return None


def normalise(answer: str) -> str:
    """An answer without white space, dollar signs, separators of thousands and a closing full stop."""
    text = answer.replace("$", "").replace("\N{MINUS SIGN}", "-")
    text = _THOUSANDS.sub("", re.sub(r"\s+", "", text))
    return text.removesuffix(".")


def number(normalised: str) -> Fraction | None:
    """The number that a normalised answer writes in digits, as a decimal or a quotient; None for anything else."""
    if _NUMBER.fullmatch(normalised):
        return Fraction(normalised)
    match = _QUOTIENT.fullmatch(normalised) or _SLASH.fullmatch(normalised)
    if match is None or int(match["bottom"]) == 0:
        return None
    value = Fraction(int(match["top"]), int(match["bottom"]))
    return -value if match["sign"] == "-" else value
