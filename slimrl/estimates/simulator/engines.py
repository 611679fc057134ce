"""All engines as one pool that decodes: a sequence gets one token in each step, and a step takes longer the more
sequences take part.

All sequences that decode are at the same speed, so one clock counts the tokens that each of them has got: a sequence
ends when the clock has risen by its tokens.
"""

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from math import inf


class Engines[Item: Hashable]:
    def __init__(self, limit: int, step_s: Callable[[int], float], on_start: Callable[[Item], None]) -> None:
        """
        Args:
            limit: sequences that decode at a time; others wait for their turn.
            step_s: seconds of a step by the sequences that decode.
            on_start: called with a sequence whose decoding begins.
        """
        self._limit, self._step_s, self._on_start = limit, step_s, on_start
        self.is_paused = False
        self._clock = 0.0
        self._order = count()
        self._ends: list[tuple[float, int, Item]] = []
        """Heap of the clock at which each sequence ends; those that were cancelled stay in it"""
        self._decoding: dict[Item, int] = {}
        """Number of each decoding sequence in the heap"""
        self._waiting: deque[tuple[Item, float]] = deque()

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def pause(self) -> None:
        """Let no sequence get a token, and none begin."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._fill()

    def submit(self, item: Item, tokens: float) -> None:
        self._waiting.append((item, tokens))
        self._fill()

    def cancel(self, item: Item) -> None:
        """End a sequence early, if it is here."""
        if self._decoding.pop(item, None) is None:
            self._waiting = deque(each for each in self._waiting if each[0] is not item)
        self._fill()

    def _fill(self) -> None:
        while not self.is_paused and self._waiting and len(self._decoding) < self._limit:
            item, tokens = self._waiting.popleft()
            number = next(self._order)
            self._decoding[item] = number
            heapq.heappush(self._ends, (self._clock + tokens, number, item))
            self._on_start(item)

    def seconds_to_end(self) -> float:
        """Seconds until the next sequence ends, if nothing else happens before; infinite if none will."""
        while self._ends and self._decoding.get(self._ends[0][2]) != self._ends[0][1]:
            heapq.heappop(self._ends)
        if self.is_paused or not self._ends:
            return inf
        return max(0.0, self._ends[0][0] - self._clock) * self._step_s(len(self._decoding))

    def elapse(self, seconds: float) -> None:
        if not self.is_paused and self._decoding:
            self._clock += seconds / self._step_s(len(self._decoding))

    def pop(self) -> Item:
        """The sequence that ends now."""
        self._clock, _, item = heapq.heappop(self._ends)
        del self._decoding[item]
        self._fill()
        return item
