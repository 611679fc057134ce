"""Assigns rows of a dense decode cache to running requests; holds no tensors.

The rows in use are always 0..n-1 for n requests, so that attention reads one contiguous block:
1. a request that decoded in the step before keeps its row, unless the row lies beyond the new n;
2. such a row moves to a free one below n;
3. a request that is new, or whose cache was written by anything but decoding, takes a free row and is filled.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """The rows of one decode step."""

    rows: list[int]
    """Row of each request, in the order of the batch: a permutation of 0..n-1."""
    moves: list[tuple[int, int]]
    """(from, to): contents to move before anything is written; sources and targets are disjoint."""
    fresh: list[int]
    """Batch positions of the requests whose whole context has to be copied in."""


class RowTable:
    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def forget(self, requests: list[int]) -> None:
        """Drop the rows of requests whose cache was written outside decoding, or whose number was given to others."""
        for request in requests:
            self._rows.pop(request, None)
            self._lengths.pop(request, None)

    def clear(self) -> None:
        self._rows.clear()
        self._lengths.clear()

    def plan(self, requests: list[int], lengths: list[int]) -> RowPlan:
        """Assign rows to a decode batch.

        Args:
            requests: a number for each request, unique among those that run.
            lengths: tokens of each, the one that this step adds included.
        """
        count = len(requests)
        kept = {
            request: self._rows[request]
            for request, length in zip(requests, lengths, strict=True)
            if self._lengths.get(request) == length - 1
        }
        taken = {row for row in kept.values() if row < count}
        free = (row for row in range(count) if row not in taken)
        moves = []
        for request, row in kept.items():
            if row >= count:
                kept[request] = next(free)
                moves.append((row, kept[request]))
        fresh = [position for position, request in enumerate(requests) if request not in kept]
        for position in fresh:
            kept[requests[position]] = next(free)
        self._rows = kept
        self._lengths = dict(zip(requests, lengths, strict=True))
        return RowPlan(rows=[kept[request] for request in requests], moves=moves, fresh=fresh)
