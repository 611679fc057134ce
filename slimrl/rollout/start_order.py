"""In which order the trajectories of a rollout begin where there are more than slots, without tasks or clocks.

A rollout that waits for all of its trajectories ends with the longest; one that begins late is its tail. Lengths are
alike within a group (Seer, arXiv:2511.14617), so that a group's first ones tell of the others.
1. One trajectory of each group begins first, as a probe, in order.
2. The others begin long-first: of the group whose longest so far is the longest, ended or still running, in seconds.
   Those of a group, and of groups that are alike, begin in order.

The trajectories are all there from the beginning, so each begins after at most all others.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Group:
    waiting: deque[str] = field(default_factory=deque)
    running: dict[str, float] = field(default_factory=dict)
    """Seconds at which each began"""
    longest_s: float = 0.0
    """Of those that have ended"""
    is_probed: bool = False

    def shown_s(self, now: float) -> float:
        return max(self.longest_s, now - min(self.running.values(), default=now))


class StartOrder:
    def __init__(self, group_of: Mapping[str, Hashable], *, long_first: bool) -> None:
        """
        Args:
            group_of: the group of each trajectory by its id, in order.
            long_first: False lets all begin in order.
        """
        self._group_of, self._long_first = dict(group_of), long_first
        self._groups: dict[Hashable, _Group] = {}
        for trajectory_id, group in group_of.items():
            self._groups.setdefault(group if long_first else None, _Group()).waiting.append(trajectory_id)

    def begin(self, now: float) -> str:
        """The trajectory that begins now.

        Args:
            now: seconds of any clock that all calls share.
        """
        waiting = [group for group in self._groups.values() if group.waiting]
        group = next((group for group in waiting if not group.is_probed), None)
        # Of equal ones the first.
        group = group or max(waiting, key=lambda group: group.shown_s(now))
        group.is_probed = True
        trajectory_id = group.waiting.popleft()
        group.running[trajectory_id] = now
        return trajectory_id

    def end(self, trajectory_id: str, now: float) -> None:
        """A trajectory has ended, in whatever way."""
        group = self._groups[self._group_of[trajectory_id] if self._long_first else None]
        group.longest_s = max(group.longest_s, now - group.running.pop(trajectory_id))
