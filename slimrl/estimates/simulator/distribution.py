"""Distributions of seconds, tokens and turns, as options give them."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

FORMS = "a number, lognormal:MEDIAN:SIGMA or pareto:LEAST:ALPHA"
"""Forms of a distribution, as help and errors name them"""


@dataclass(frozen=True)
class Distribution:
    """Distribution of a number that is at least 0."""

    draw: Callable[[random.Random], float]
    text: str
    """Text of the distribution, as in the option"""


def constant(value: float) -> Distribution:
    return Distribution(lambda rng: value, f"{value:g}")


def read_distribution(option: str, text: str, *, least: float = 0.0) -> Distribution:
    """
    Args:
        option: for the error.
        text: `3`, `lognormal:MEDIAN:SIGMA` with the standard deviation of the logarithm, `pareto:LEAST:ALPHA` with
            P(x > t) = (LEAST / t) ** ALPHA.
        least: smallest number, MEDIAN or LEAST.

    Raises:
        ValueError: it is none of these, or below `least`.
    """
    kind, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts] if parts else [float(kind)]
    except ValueError:
        numbers = [math.nan]
    distribution = _distribution(text, kind if parts else None, numbers)
    if distribution is None:
        raise ValueError(f"{option} {text}: must be {FORMS}, of finite numbers that are not negative (ALPHA above 0)")
    if numbers[0] < least:
        raise ValueError(f"{option} {text}: must be {FORMS}; a number, MEDIAN or LEAST is at least {least:g}")
    return distribution


def _distribution(text: str, kind: str | None, numbers: list[float]) -> Distribution | None:
    """The distribution; None if there is none of this kind with such numbers."""
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    if kind is None:
        return constant(numbers[0])
    if len(numbers) == 2:
        scale, form = numbers
        if kind == "lognormal":
            return Distribution(lambda rng: scale * rng.lognormvariate(0.0, form), text)
        if kind == "pareto" and form > 0:
            return Distribution(lambda rng: scale * rng.paretovariate(form), text)
    return None
