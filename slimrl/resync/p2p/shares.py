"""Which holder serves which part of the engines' demands, so that all trainer ranks send about as much.

1. Demands with the same holders are a class. Classes with fewer holders are settled first, since they have less choice.
2. The bytes of a class, of all engines together, are divided among its holders so that those that have the least to
   send so far get the most.
3. The class's demands, engine after engine, are laid in a row, and each holder takes its quota from the row. So engines
   that are copies of each other are served by different holders, and few demands are cut.

Of the ranks of an engine that keep the same region, the one that has got the least so far gets it from the trainer.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from slimrl.data.boxes import Box, cut, rows
from slimrl.resync.p2p.demand import Demand, Holders

Choice = Callable[[Holders], Holders]
"""Function that chooses, of the holders of something, those that serve it to an engine"""


class Share(NamedTuple):
    """What one trainer rank sends to one rank of an engine, which passes it on to the others that keep it."""

    tensor: int
    """Index among the sent tensors"""
    box: Box
    nbytes: int
    source: int
    """Rank of the trainer"""
    target: int
    """Rank of the engine"""
    ranks: tuple[int, ...]
    """Ranks of the engine that keep it, the target among them"""


class Shares:
    """The shares of all engines, computed engine by engine when they are asked for: those of a large model are many.

    Args:
        engines: the demands of each. Engines with the same demands may have the same object.
        chosen: of each engine; None: all holders serve.
    """

    def __init__(self, engines: Sequence[Sequence[Demand]], chosen: Sequence[Choice] | None = None) -> None:
        self._engines, self._chosen = engines, chosen
        sizes = {id(needed): _class_bytes(needed) for needed in engines}
        self._sizes: list[Counter[Holders]] = []
        """Bytes that each engine needs of each class"""
        for engine, needed in enumerate(engines):
            size: Counter[Holders] = Counter()
            for holders, nbytes in sizes[id(needed)].items():
                size[self._choose(engine, holders)] += nbytes
            self._sizes.append(size)
        self._before: list[Counter[Holders]] = []
        """Bytes of each class that earlier engines need, by engine"""
        total: Counter[Holders] = Counter()
        for size in self._sizes:
            self._before.append(total.copy())
            total.update(size)
        self._quotas: dict[Holders, list[int]] = {}
        self.sent: Counter[int] = Counter()
        """Bytes that each trainer rank is to send, but for what cuts between rows add and take"""
        for holders in sorted(total, key=lambda each: (len(each), each)):
            quotas = level(total[holders], [self.sent[rank] for rank in holders])
            self._quotas[holders] = quotas
            self.sent.update(dict(zip(holders, quotas, strict=True)))

    def most_served(self) -> int:
        """Most engines to which a trainer rank sends."""
        served: dict[int, set[int]] = defaultdict(set)
        # A cut between rows may be as far as a row from the end of a quota, and so in the next engine's part.
        known = {id(needed): needed for needed in self._engines}
        row = max((one.nbytes // rows(one.box) for needed in known.values() for one in needed), default=0)
        for holders, quotas in self._quotas.items():
            ends = list(accumulate(quotas))
            for engine, (before, size) in enumerate(zip(self._before, self._sizes, strict=True)):
                if holders in size:
                    start = before[holders]
                    first, last = bisect_left(ends, start - row), bisect_left(ends, start + size[holders] + row)
                    for rank in holders[first : last + 1]:
                        served[rank].add(engine)
        return max(map(len, served.values()), default=0)

    def of(self, engine: int) -> list[Share]:
        """Shares of an engine, in the order of the tensors."""
        rows = {holders: _Row(quotas, self._before[engine][holders]) for holders, quotas in self._quotas.items()}
        got: Counter[int] = Counter()
        shares = []
        for demand in self._engines[engine]:
            holders = self._choose(engine, demand.holders)
            # Most demands have one holder and one rank: those of experts.
            served = rows[holders].take(demand) if len(holders) > 1 else [(0, demand)]
            for number, part in served:
                several = len(part.ranks) > 1
                target = min(part.ranks, key=lambda rank: (got[rank], rank)) if several else part.ranks[0]
                got[target] += part.nbytes
                shares.append(Share(part.tensor, part.box, part.nbytes, holders[number], target, part.ranks))
        return shares

    def _choose(self, engine: int, holders: Holders) -> Holders:
        return holders if self._chosen is None else self._chosen[engine](holders)


def _class_bytes(demands: Sequence[Demand]) -> Counter[Holders]:
    sizes: Counter[Holders] = Counter()
    for demand in demands:
        sizes[demand.holders] += demand.nbytes
    return sizes


class _Row:
    """A class's demands in a row, from some position on, and its holders' quotas of the row.

    Args:
        start: bytes of the row before the first demand.
    """

    def __init__(self, quotas: Sequence[int], start: int) -> None:
        self._quotas, self._number, self._left = quotas, 0, quotas[0]
        self._pass(start)

    def take(self, demand: Demand) -> Iterator[tuple[int, Demand]]:
        """(index of the holder, what it serves of the demand)."""
        row_bytes = demand.nbytes // rows(demand.box)
        while True:
            fitting = self._left // row_bytes
            if self._left >= demand.nbytes or fitting <= 0 or self._number + 1 == len(self._quotas):
                number = self._number
                self._pass(demand.nbytes)
                yield number, demand
                return
            box, others = cut(demand.box, fitting)
            number = self._number
            self._pass(fitting * row_bytes)
            yield number, demand._replace(box=box, nbytes=fitting * row_bytes)
            demand = demand._replace(box=others, nbytes=demand.nbytes - fitting * row_bytes)
            if self._number == number and self._number + 1 < len(self._quotas):
                # Less than a row is left of its quota.
                self._number += 1
                self._left += self._quotas[self._number]

    def _pass(self, nbytes: int) -> None:
        self._left -= nbytes
        while self._left <= 0 and self._number + 1 < len(self._quotas):
            self._number += 1
            self._left += self._quotas[self._number]


def level(nbytes: int, loads: Sequence[int]) -> list[int]:
    """Quotas that add up to `nbytes` and bring the lowest loads to one level, as water fills vessels."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    total = nbytes
    for count, index in enumerate(order, 1):
        total += loads[index]
        if count == len(order) or total <= count * loads[order[count]]:
            break
    filled = order[:count]
    quotas = [0] * len(loads)
    for number, index in enumerate(filled):
        # The remainder of the division goes to the first ones.
        quotas[index] = total // count + (number < total % count) - loads[index]
    return quotas
