"""What a simulation measured."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(kw_only=True)
class Outcome:
    """Measurements of the steps after the first few, in which the pipeline fills."""

    steps: int = 0
    seconds: float = 0.0
    trainer_busy_s: float = 0.0
    """Time in which the trainer trains or sends weights"""
    engines_busy_s: float = 0.0
    """Time in which an engine decodes or gets weights; mean over the engines"""
    slots_used_s: float = 0.0
    """Time in which a slot is used by a trajectory, tools included; mean over the slots"""
    ages: Counter[int] = field(default_factory=Counter)
    """Number of groups that were trained on, by their age"""
    durations_s: list[float] = field(default_factory=list)
    """Durations of trajectories, from their first turn to their end"""
    dropped: int = 0
    """Number of groups that were dropped as too old"""
    aborted: int = 0
    """Number of trajectories that were aborted at their deadline"""
    trajectories: int = 0
    """Number of trajectories that were trained on"""

    @property
    def steps_per_hour(self) -> float:
        return 3600 * self.steps / self.seconds

    @property
    def trajectories_per_s(self) -> float:
        return self.trajectories / self.seconds

    @property
    def trainer_idle(self) -> float:
        return 1 - self.trainer_busy_s / self.seconds

    @property
    def engines_idle(self) -> float:
        return 1 - self.engines_busy_s / self.seconds

    @property
    def slots_used(self) -> float:
        return self.slots_used_s / self.seconds

    def ages_sorted(self) -> np.ndarray:
        """int64 [groups that were trained on]"""
        return np.repeat(*np.array(sorted(self.ages.items())).T)

    @property
    def tail(self) -> float:
        """99th percentile of the trajectories' durations over their median."""
        median, slow = np.percentile(self.durations_s, [50, 99])
        return float(slow / median)

    def as_json(self) -> dict[str, Any]:
        ages = self.ages_sorted()
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "steps_per_hour": self.steps_per_hour,
            "trajectories_per_s": self.trajectories_per_s,
            "trainer_idle": self.trainer_idle,
            "engines_idle": self.engines_idle,
            "slots_used": self.slots_used,
            "staleness": {
                "mean": float(ages.mean()),
                "p95": float(np.percentile(ages, 95, method="higher")),
                "max": int(ages.max()),
                "histogram": {str(age): number for age, number in sorted(self.ages.items())},
            },
            "dropped_groups": self.dropped,
            "aborted_trajectories": self.aborted,
            "trajectory_s": {
                name: float(seconds)
                for name, seconds in zip(
                    ("p50", "p99", "max"), np.percentile(self.durations_s, [50, 99, 100]), strict=True
                )
            },
            "trajectory_p99_over_p50": self.tail,
        }
