"""The order in which the trajectories of a rollout begin where there are more than slots, without tasks or clocks.

A rollout that waits for all of its trajectories ends with the longest; one that begins late is its tail. Lengths are
alike within a group (Seer, arXiv:2511.14617), so that a group's first ones tell of the others.
1. One trajectory of each group begins first, as a probe, in order.
2. The others begin long-first: of the group whose longest so far is the longest, ended or still running, in seconds.
   Those of a group, and of groups that are alike, begin in order.

The trajectories are all there from the beginning, so each begins after at most all others.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Group:
    waiting: deque[str] = field(default_factory=deque)
    running: dict[str, float] = field(default_factory=dict)
    """Begin of each running trajectory, in seconds"""
    longest_s: float = 0.0
    """Duration of the longest trajectory that has ended"""


class StartOrder:
    def __init__(self, group_of: Mapping[str, Hashable], *, long_first: bool) -> None:
        """
        Args:
            group_of: the group of each trajectory by its id, in order.
            long_first: False lets all begin in order.
        """
        groups: dict[Hashable, _Group] = {}
        self._group_of: dict[str, int] = {}
        for trajectory_id, name in group_of.items():
            group = groups.setdefault(name if long_first else None, _Group())
            group.waiting.append(trajectory_id)
        self._groups = list(groups.values())
        for number, group in enumerate(self._groups):
            self._group_of |= dict.fromkeys(group.waiting, number)
        self._unprobed = deque(range(len(self._groups)))
        # Heaps, so that a begin does not look at every group. An entry is dropped when it is first and says nothing any
        # more; one of a group that has a longer trajectory since then comes after that one's.
        self._ended: list[tuple[float, int]] = []
        """Heap of (-seconds of the group's longest, group)"""
        self._running: list[tuple[float, int, str]] = []
        """Heap of (when it began, group, trajectory)"""

    def begin(self, now: float) -> str:
        """The trajectory that begins now.

        Args:
            now: seconds of any clock that all calls share.
        """
        number = self._unprobed.popleft() if self._unprobed else self._longest(now)
        group = self._groups[number]
        trajectory_id = group.waiting.popleft()
        group.running[trajectory_id] = now
        heapq.heappush(self._running, (now, number, trajectory_id))
        return trajectory_id

    def end(self, trajectory_id: str, now: float) -> None:
        """Note that a trajectory has ended, in whatever way."""
        number = self._group_of[trajectory_id]
        group = self._groups[number]
        group.longest_s = max(group.longest_s, now - group.running.pop(trajectory_id))
        heapq.heappush(self._ended, (-group.longest_s, number))

    def _longest(self, now: float) -> int:
        """The group with the longest trajectory so far, among those with trajectories that wait; of equal ones the
        first."""
        while self._ended and not self._groups[self._ended[0][1]].waiting:
            heapq.heappop(self._ended)
        while self._running and not self._tells(*self._running[0][1:]):
            heapq.heappop(self._running)
        running = [(began - now, number) for began, number, _ in self._running[:1]]
        return min(self._ended[:1] + running)[1]

    def _tells(self, number: int, trajectory_id: str) -> bool:
        """Whether an entry of the heap still counts: the trajectory runs, and others of its group wait."""
        group = self._groups[number]
        return bool(group.waiting) and trajectory_id in group.running
