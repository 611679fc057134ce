"""Distributions of seconds, tokens and turns, as options give them."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

FORMS = "a number, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA"
"""As in help and errors"""


@dataclass(frozen=True)
class Distribution:
    """Of a number that is at least 0."""

    draw: Callable[[random.Random], float]
    text: str
    """As the option has it"""


def constant(value: float) -> Distribution:
    return Distribution(lambda rng: value, f"{value:g}")


def read_distribution(option: str, text: str) -> Distribution:
    """
    Args:
        option: for the error.
        text: `3`, `lognormal:MEDIAN:SIGMA` with the standard deviation of the logarithm, `pareto:LEAST:ALPHA` with
            P(x > t) = (LEAST / t) ** ALPHA.

    Raises:
        ValueError: it is none of these.
    """
    kind, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts] if parts else [float(kind)]
    except ValueError:
        numbers = [math.nan]
    if all(math.isfinite(number) and number >= 0 for number in numbers):
        if not parts:
            return constant(numbers[0])
        if len(numbers) == 2:
            scale, form = numbers
            if kind == "lognormal":
                return Distribution(lambda rng: scale * rng.lognormvariate(0.0, form), text)
            if kind == "pareto" and form > 0:
                return Distribution(lambda rng: scale * rng.paretovariate(form), text)
    raise ValueError(f"{option} {text}: must be {FORMS}, of finite numbers that are not negative (ALPHA above 0)")
