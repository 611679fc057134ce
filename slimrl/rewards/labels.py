"""Labels of prompts, as data files and the libraries that write them have them.

Tables leave holes (None, NaN, empty texts, the words that pandas writes for them), turn integers into floats where a
column has a hole, and hold scalars of numpy. Published sets have columns with whole solutions, which no answer equals.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from slimrl.data.prompt import Prompt
from slimrl.rewards.texts import BOX, boxed

HOLES = {"None", "nan", "NaN", "<NA>", "NaT", "null"}
"""Texts that stand for a missing value after a table was written as text"""
_MARKED = re.compile(r"^####[^\n]*\Z", re.MULTILINE)
"""The last line of a solution of GSM8K"""
PREPARED = "`slimrl-tools prepare {} FILE OUT` writes {} with the answers alone."


def label_text(label: Any) -> str:
    """A label that is a text or a number, as text; a float that is whole as an integer.

    Raises:
        ValueError: it is something else, or a hole; says which.
    """
    if isinstance(label, np.generic):
        # float32 0.1 is 0.1 and not the float64 that is nearest to it.
        label = float(str(label)) if isinstance(label, np.floating) else label.item()
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"{str(label)[:80]!r} is no text and no number")
    if isinstance(label, float):
        if not math.isfinite(label):
            raise ValueError(f"{label} is no number")
        return str(int(label)) if label.is_integer() else repr(label)
    text = str(label).strip()
    if not text or text in HOLES:
        raise ValueError(
            f"{text!r} is what a hole in a table becomes, and no answer; where it is one, write it as `none`"
        )
    return text


def refuse_solution(label: str) -> None:
    """Raises ValueError for a label that is a whole solution, in which the answer is marked."""
    if _MARKED.search(label):
        said = PREPARED.format("gsm8k", "GSM8K")
        raise ValueError(f"it is a whole solution, whose answer stands behind ####. {said}")
    inner = boxed(label)
    if inner is not None and f"{BOX}{inner}}}" != label.strip("$ "):
        said = PREPARED.format("math", "MATH")
        raise ValueError(f"it is a whole solution, whose answer stands in \\boxed{{}}. {said}")


def only_label(prompt: Prompt) -> str:
    """The label of a prompt that has one, as text. Raises ValueError if no answer could match it."""
    try:
        label = label_text(prompt.label)
        refuse_solution(label)
        return label
    except ValueError as error:
        raise ValueError(f"the label of {prompt.prompt_id}: {error}") from error


def label_list(prompt: Prompt) -> list[str]:
    """The labels of a prompt that has one or a list of them. Raises ValueError if no answer could match one."""
    given = prompt.label if isinstance(prompt.label, list) else [prompt.label]
    if not given:
        raise ValueError(f"the label of {prompt.prompt_id} is an empty list")
    try:
        labels = [label_text(label) for label in given]
        for label in labels:
            refuse_solution(label)
        return labels
    except ValueError as error:
        raise ValueError(f"the label of {prompt.prompt_id}: {error}") from error


def checked_by[F: Callable[..., Any]](check: Callable[[Prompt], Any]) -> Callable[[F], F]:
    """Decorator that gives a reward function the method `check_prompt`, with which it refuses prompts when they are
    read."""

    def with_check(function: F) -> F:
        vars(function)["check_prompt"] = check
        return function

    return with_check
