"""Finds the bad nodes of a group whose all-reduce failed, by running it in pairs.

1. All nodes are paired, at once. A pair that passes proves both of its nodes good. Where no pair passes, the nodes are
   paired differently, PAIRINGS times at most.
2. Every other node is paired with a good one. It is good if the pair passes, else bad.

A node is never tried alone: it would pass even with a broken network. A node is never called bad for failing with a
partner that may be bad itself. Standard library alone, see slurm.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

PAIRINGS = 3
"""Enough for each of up to four nodes to be paired with each other one. If more nodes fail in all pairs, the cause is
hardly a node."""

Pair = tuple[str, str]


def split_nodes(nodes: Sequence[str], run: Callable[[Sequence[Pair]], set[Pair]]) -> tuple[list[str], dict[str, str]]:
    """The good nodes, and for each bad node the good one that it failed with.

    Both are empty where no pair passed: then nobody knows which nodes are bad.

    Args:
        run: runs pairs side by side and returns those that passed.
    """
    proven: set[str] = set()
    for pairs in itertools.islice(pairings(nodes), PAIRINGS):
        proven = {node for pair in run(pairs) for node in pair}
        if proven:
            break
    bad: dict[str, str] = {}
    suspects = [node for node in nodes if node not in proven]
    while proven and suspects:
        # The shorter of the two ends it: with few good nodes the remaining suspects wait for the next round.
        pairs = list(zip([node for node in nodes if node in proven], suspects))  # noqa: B905 (strict= is of Python 3.10)
        passed = run(pairs)
        for helper, suspect in pairs:
            if (helper, suspect) in passed:
                proven.add(suspect)
            else:
                bad[suspect] = helper
        suspects = suspects[len(pairs) :]
    return [node for node in nodes if node in proven], bad


def pairings(nodes: Sequence[str]) -> Iterator[list[Pair]]:
    """Rounds in which each node is paired with each other one once; of an odd number one rests in each round."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        facing = [(ring[index], ring[-1 - index]) for index in range(len(ring) // 2)]
        yield [(one, other) for one, other in facing if one is not None and other is not None]
        # The first stays, the others rotate.
        ring = [ring[0], ring[-1], *ring[1:-1]]
