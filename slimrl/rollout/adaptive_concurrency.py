"""How many trajectories should run, by how full the engines' KV caches are: additive up, multiplicative down.

An observation is what happened since the one before.
1. An engine took KV cache away from running requests (SGLang's retraction), or they hold CUT_USAGE of it: the limit
   falls to CUT of the trajectories that run, which end by themselves. It does not fall again before so few run, nor
   while less than TAIL of the limit do: those are the long ones at the end of a step, which it does not hold back.
2. Else, if the limit holds trajectories back and the fullest engine's requests hold less than GROW_USAGE: the limit
   rises by the trajectories that ended, which doubles it within the time of a trajectory, up to the threshold; from
   there on by 1 / STEPS of the most that may run within that time.

A pure state machine, as TCP's congestion control (RFC 5681): its clock are trajectories that end, because a cache says
only then what the trajectories that began meanwhile need. The threshold is where the limit was last cut to.
"""

import math
from dataclasses import dataclass

START, STEPS = 0.25, 16
CUT, CUT_USAGE, GROW_USAGE, TAIL = 0.8, 0.98, 0.9, 0.5


@dataclass(kw_only=True)
class AdaptiveConcurrency:
    """
    Args:
        most, least: trajectories of all engines, between which the limit stays. It begins at START of the most.
    """

    most: int
    least: int

    def __post_init__(self) -> None:
        self._limit = max(self.least, START * self.most)
        self._threshold = float(self.most)

    @property
    def limit(self) -> int:
        return math.floor(self._limit)

    def observe(self, *, running: int, ended: int, retractions: int, usage: float) -> int:
        """The new limit of running trajectories.

        Args:
            running: trajectories that hold a slot now.
            ended: trajectories that have given theirs back since the last observation.
            retractions: of all engines since then.
            usage: fraction of the fullest engine's KV cache that running requests hold.
        """
        if retractions > 0 or usage >= CUT_USAGE:
            if TAIL * self.limit <= running <= self.limit:
                self._limit = self._threshold = max(self.least, CUT * running)
        elif running >= self.limit and usage < GROW_USAGE:
            if self._limit < self._threshold:
                self._limit = min(self._threshold, self._limit + ended)
            else:
                self._limit = min(self.most, self._limit + ended * min(1, self.most / STEPS / self._limit))
        return self.limit
