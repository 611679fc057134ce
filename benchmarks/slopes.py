"""Whether a figure grows with time: the slope of a line through it, and an interval from permutations.

Measurements that follow each other are alike, so the line goes through the means of stretches of time, which are nearly
independent of each other. The interval needs no distribution: the residuals are dealt anew to the stretches, and the
slopes that this alone makes say how far a slope may be from the true one (Edgington and Onghena, Randomization Tests).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

STRETCHES = 20
"""Number of stretches of time"""
PERMUTATIONS = 20_000


@dataclass(frozen=True)
class Slope:
    per_hour: float
    half_width: float
    """Half the width of the interval, which lies around `per_hour`"""
    mean: float
    """Mean of the figure"""

    @property
    def is_zero(self) -> bool:
        """Whether no change is within the interval."""
        return abs(self.per_hour) <= self.half_width


def slope_of(hours: ArrayLike, values: ArrayLike, confidence: float) -> Slope:
    """
    Args:
        hours: of the measurements, ascending, over a time that is not 0.
        confidence: of the interval, such as 0.95.

    Raises:
        ValueError: there are fewer measurements than stretches.
    """
    at, found = np.asarray(hours, float), np.asarray(values, float)
    if len(at) < STRETCHES:
        raise ValueError(f"{len(at)} measurements are too few for a slope, which needs {STRETCHES}.")
    times = np.array([part.mean() for part in np.array_split(at, STRETCHES)])
    means = np.array([part.mean() for part in np.array_split(found, STRETCHES)])
    centred = times - times.mean()
    weights = centred / (centred @ centred)
    slope = float(weights @ means)
    residuals = means - means.mean() - slope * centred
    # As large as those of the true line are: two parameters were fitted.
    residuals *= np.sqrt(STRETCHES / (STRETCHES - 2))
    dealt = np.random.default_rng(0).permuted(np.tile(residuals, (PERMUTATIONS, 1)), axis=1) @ weights
    return Slope(slope, float(np.quantile(np.abs(dealt), confidence)), float(found.mean()))
