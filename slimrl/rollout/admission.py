"""Which groups may begin, and which are trained on: counts and ages, without tasks or clocks.

A group is a prompt with its trajectories. `version` counts the trainer's updates of the weights.
1. A group begins while there is capacity: the most that may run less those that do, and at most as many groups as the
   next `max_staleness + 1` updates of the run take, less those that were taken, wait or run (as in AReaL,
   arXiv:2505.24298, section 5.1).
2. A group that ended waits until it is taken. One that is filtered out or failed leaves the counts, and another may
   begin in its place.
3. A batch is taken, the oldest groups first. A group's age is the version at that moment, which is the one that the
   update starts from, less the lowest version that sampled one of its tokens.
4. After the update the version rises. Under `too_old: drop`, groups that no later batch may take then end at once;
   under `wait`, a batch is taken only if the later ones can take all other groups, oldest first, before these are too
   old; under `train` none is too old.

Every group that began is running, waiting, taken, filtered, failed or dropped; `counts` says how many are.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode, TooOld

ENDS = ("taken", "filtered", "failed", "dropped")
"""Ways in which a group leaves."""


@dataclass(kw_only=True)
class Admission:
    """The counts and ages of groups, which have numbers, from 0 in the order in which they begin."""

    batch: int
    """Number of groups of an update"""
    max_running: int
    max_staleness: int
    too_old: TooOld
    last_version: int
    """Version at which the run ends"""
    most_present: int | None = None
    """Largest number of groups that run or wait, whatever the version; None for as many as the staleness admits"""
    version: int = 0
    begun: int = 0
    running: dict[int, int] = field(default_factory=dict)
    """Version when each running group began, by the group's number: none of its tokens is of an earlier one"""
    waiting: dict[int, int] = field(default_factory=dict)
    """Lowest version among the sampled tokens of each group that has ended and waits, by the group's number"""
    ended: Counter[str] = field(default_factory=Counter)
    """Number of groups that left in each way of ENDS"""
    surplus: int = 0
    """Number of groups that were taken beyond those of `version` batches: earlier ones may have been larger, see
    `refit`"""

    @property
    def capacity(self) -> int:
        """How many groups may begin now."""
        present = len(self.running) + len(self.waiting)
        updates = (
            self.last_version if self.most_present else min(self.max_staleness + self.version + 1, self.last_version)
        )
        ahead = updates * self.batch - (self.ended["taken"] - self.surplus) - present
        room = ahead if self.most_present is None else self.most_present - present
        return max(0, min(self.max_running - len(self.running), ahead, room))

    @property
    def counts(self) -> dict[str, int]:
        """Groups by where they are; the values add up to `begun`."""
        return {"running": len(self.running), "waiting": len(self.waiting)} | {name: self.ended[name] for name in ENDS}

    def begin(self) -> int:
        """The number of a group that begins now."""
        assert self.capacity > 0
        number = self.begun
        self.begun += 1
        self.running[number] = self.version
        return number

    def finish(self, number: int, lowest: int) -> None:
        """Note that a group has ended and can be trained on.

        Args:
            lowest: the lowest version that sampled one of its tokens.
        """
        begun = self.running.pop(number)
        assert lowest >= begun
        self.waiting[number] = lowest

    def leave(self, number: int, end: str) -> None:
        """Note that nothing of a group that has ended is trained on: it is `filtered` or `failed`."""
        assert end in ("filtered", "failed")
        del (self.running if number in self.running else self.waiting)[number]
        self.ended[end] += 1

    @property
    def is_ready(self) -> bool:
        """Whether a batch may be taken."""
        if len(self.waiting) < self.batch:
            return False
        if self.too_old is not TooOld.wait:
            return True
        left = self.running | self.waiting
        for number in self._oldest():
            del left[number]
        ages = sorted(map(self.age, left.values()), reverse=True)
        return all(age + 1 + place // self.batch <= self.max_staleness for place, age in enumerate(ages))

    def _oldest(self) -> list[int]:
        """The numbers of the waiting groups that a batch would take."""
        return sorted(self.waiting, key=lambda number: (self.waiting[number], number))[: self.batch]

    def take(self) -> list[int]:
        """The numbers of the next batch's groups, the oldest first."""
        assert self.is_ready
        taken = self._oldest()
        for number in taken:
            del self.waiting[number]
        self.ended["taken"] += len(taken)
        return taken

    def advance(self) -> list[int]:
        """The weights were updated. Returns the numbers of groups, running or waiting, that are dropped as too old."""
        self.version += 1
        if self.too_old is not TooOld.drop:
            return []
        present = self.running | self.waiting
        return self.drop([number for number, lowest in present.items() if self.age(lowest) > self.max_staleness])

    def drop(self, numbers: Iterable[int]) -> list[int]:
        """Let groups go, running or waiting, that no batch is to take; their numbers in order."""
        numbers = sorted(numbers)
        for number in numbers:
            self.running.pop(number, None)
            self.waiting.pop(number, None)
        self.ended["dropped"] += len(numbers)
        return numbers

    def age(self, lowest: int) -> int:
        """Age of a group, at an update that starts from the present version."""
        return max(0, self.version - lowest)

    def skip(self, version: int) -> None:
        """Begin at this version, as if each update before had taken its groups."""
        self.version, self.begun = version, version * self.batch
        self.ended["taken"] = self.begun

    def refit(self) -> list[int]:
        """Count on under other settings than those of the restored state, between two updates.

        Returns:
            The numbers of groups that are dropped, since no batch may take them any more; none if nothing changed.
        """
        self.surplus = self.ended["taken"] - self.version * self.batch
        if self.too_old is TooOld.train:
            return []
        present, kept = self.running | self.waiting, 0
        dropped = []
        for number in sorted(present, key=lambda number: (present[number], number)):
            updates = kept // self.batch if self.too_old is TooOld.wait else 0
            if self.age(present[number]) + updates > self.max_staleness:
                dropped.append(number)
            else:
                kept += 1
        return self.drop(dropped)

    def state(self) -> dict[str, Any]:
        """State for `restore`."""
        groups = {name: [list(item) for item in getattr(self, name).items()] for name in ("running", "waiting")}
        return {"version": self.version, "begun": self.begun, "ended": dict(self.ended), **groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; its running groups must run again."""
        self.version, self.begun, self.ended = state["version"], state["begun"], Counter(state["ended"])
        self.running, self.waiting = dict(state["running"]), dict(state["waiting"])


@dataclass(kw_only=True)
class StepAdmission(Admission):
    """The groups of synchronous steps, with a staleness of 0, in rounds.

    1. The first round of a step has `oversampling` times a batch's groups. While groups are missing when a round has
       ended and `max_refills` is not reached, another round follows, of `oversampling` times as many as are missing.
    2. The step takes the first of the groups that wait, in the order in which they began; they may be fewer than a
       batch.

    Numbers and counts are those of a step.
    """

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
        assert count <= self.capacity > 0
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
