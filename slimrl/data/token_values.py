"""What the updates of a step find at the tokens of the segments that the run records."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from slimrl.data.trajectory import Segment, Trajectory

TRAINER_LOGPROBS = "trainer_logprobs"
"""Name of the trainer's log-probs before the first update of a step"""
TOKEN_VALUES = (TRAINER_LOGPROBS, "advantages", "ratios", "clipped", "entropies")
"""Names of all values; docs/data_formats.md says what each is."""


class TokenValues:
    """Values of the sampled tokens of segments, T tokens each.

    A segment is known by its array of tokens, which copies of it share: an episode's trajectories by role are copies.
    """

    def __init__(self, trajectories: Iterable[Trajectory] = ()) -> None:
        """
        Args:
            trajectories: those that are recorded.
        """
        self.trajectories = list(trajectories)
        self._wanted = {id(segment.tokens) for one in self.trajectories for segment in one.segments}
        self._found: dict[int, dict[str, np.ndarray]] = {}

    def numbers_in(self, segments: Sequence[Segment]) -> frozenset[int]:
        """The places of recorded segments among these."""
        return frozenset(number for number, one in enumerate(segments) if id(one.tokens) in self._wanted)

    def add(self, segment: Segment, values: dict[str, np.ndarray], without: Collection[str] = ()) -> None:
        """Add what an update found.

        Args:
            values: by name, [S] of the segment's sampled tokens but for one that is its first.
            without: names that do not hold for this update.
        """
        places_S = 1 + np.flatnonzero(segment.loss_mask[1:])
        found: dict[str, np.ndarray] = {}
        for name, values_S in values.items():
            if name not in without:
                found[name] = np.full(len(segment), np.nan, np.float32)
                found[name][places_S] = values_S
        self._found[id(segment.tokens)] = found

    def of(self, segment: Segment) -> dict[str, np.ndarray]:
        """float32 [T] by name, NaN where nothing was computed; empty if no update read the segment."""
        return self._found.get(id(segment.tokens), {})
