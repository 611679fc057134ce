"""Which groups of synchronous steps may begin: admission.py with a staleness of 0, in rounds.

1. The first round of a step has `oversampling` times a batch's groups. While groups are missing when a round has ended
   and `max_refills` is not reached, another round follows, of `oversampling` times as many as are missing.
2. The step takes the first of the groups that wait, in the order in which they began; they may be fewer than a batch.

Numbers and counts are those of a step.
"""

import math
from dataclasses import dataclass
from typing import Any

from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.rollout.admission import Admission


@dataclass(kw_only=True)
class StepAdmission(Admission):
    oversampling: float
    max_refills: int
    rounds: int = 0
    """Number of rounds that have begun in this step"""
    is_exhausted: bool = False
    """Whether no prompt is left for another round"""

    @property
    def capacity(self) -> int:
        """How many groups the next round has; 0 if there is none now."""
        if self.running or self.is_exhausted or self.rounds > self.max_refills:
            return 0
        return max(0, math.ceil(self.oversampling * (self.batch - len(self.waiting))))

    def begin_round(self, count: int) -> list[int]:
        """The numbers of the groups of a round, at most `capacity`; with none the step has no further round."""
        assert count <= self.capacity
        self.is_exhausted = not count
        self.rounds += bool(count)
        numbers = list(range(self.begun, self.begun + count))
        self.begun += count
        self.running = dict.fromkeys(numbers, self.version)
        return numbers

    @property
    def is_ready(self) -> bool:
        return not self.running and not self.capacity

    def take(self) -> list[int]:
        assert self.is_ready
        numbers = sorted(self.waiting)[: self.batch]
        for number in numbers:
            del self.waiting[number]
        self.ended["taken"] += len(numbers)
        return numbers

    def advance(self) -> list[int]:
        self.skip(self.version + 1)
        return []

    def skip(self, version: int) -> None:
        self.version, self.begun, self.rounds, self.is_exhausted = version, 0, 0, False
        self.ended.clear()


def admission_of(recipe: Recipe) -> Admission:
    """The admission of a recipe's groups: a StepAdmission where none of them spans steps."""
    rollout, sampling = recipe.rollout, recipe.algorithm.dynamic_sampling
    given: dict[str, Any] = {
        "batch": rollout.prompts_per_step,
        "max_running": rollout.max_concurrency_per_engine * rollout.most_engines,
        "too_old": rollout.too_old,
        "last_version": recipe.steps,
    }
    if not rollout.spans_steps:
        refills = sampling.refill is not RefillMode.off
        return StepAdmission(
            **given,
            max_staleness=0,
            oversampling=sampling.oversampling if refills else 1,
            max_refills=sampling.max_refills if refills else 0,
        )
    most = math.ceil(rollout.oversample * rollout.prompts_per_step)
    return Admission(
        **given,
        max_staleness=1 if rollout.mode is RolloutMode.one_step_off else rollout.max_staleness,
        most_present=most if rollout.mode is RolloutMode.sync else None,
    )
