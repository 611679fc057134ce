"""Which nodes of a group are bad, where they have not come through a round together: found by trying them in twos.

1. All are paired, at once. A pair that comes through proves both of its nodes; where none does, they are paired
   otherwise, PAIRINGS times at most.
2. Every node that is not proven is paired with one that is. It is proven itself, or bad.

A node is never tried alone: it would come through where nothing but its network is bad. Nor is one called bad for
having failed beside another that may be. Standard library alone, see slurm.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

PAIRINGS = 3
"""Of up to four nodes each meets each other. Where more fail in all pairs, what is bad is hardly a node."""

Pair = tuple[str, str]
Try = Callable[[Sequence[Pair]], set[Pair]]
"""Runs pairs side by side and returns those that came through."""


def split_nodes(nodes: Sequence[str], run: Try) -> tuple[list[str], dict[str, str]]:
    """The nodes that came through beside another, and by each bad node the good one that it failed beside.

    Both are empty where no pair came through: then it cannot be said who is bad.
    """
    proven: set[str] = set()
    for pairs in itertools.islice(pairings(nodes), PAIRINGS):
        proven = {node for pair in run(pairs) for node in pair}
        if proven:
            break
    bad: dict[str, str] = {}
    suspects = [node for node in nodes if node not in proven]
    while proven and suspects:
        helpers = [node for node in nodes if node in proven]
        pairs = [(helper, suspects[index]) for index, helper in enumerate(helpers[: len(suspects)])]
        came = run(pairs)
        for pair in pairs:
            helper, suspect = pair
            if pair in came:
                proven.add(suspect)
            else:
                bad[suspect] = helper
        suspects = suspects[len(pairs) :]
    return [node for node in nodes if node in proven], bad


def pairings(nodes: Sequence[str]) -> Iterator[list[Pair]]:
    """Rounds in which each node meets each other once; one rests in each round of an odd number."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        facing = [(ring[index], ring[-1 - index]) for index in range(len(ring) // 2)]
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        # One stays where it is, the others go round.
        ring = [ring[0], ring[-1], *ring[1:-1]]
