"""Draws queries of which a given entity is a member. Whether it is the only one is looked at afterwards (questions.py).

A query is built backward from the entity: a relation that leads to it from another entity is a constraint, and the
other entity is a constant, or is described by constraints in turn, so many hops deep.
"""

import random
from collections.abc import Callable

from slimrl_tools.synthesis.graph import Graph
from slimrl_tools.synthesis.query import Difference, Entity, Intersection, Projection, Query, Union, members

MIN_DEPTH = {"chain": 1, "intersection": 1, "union": 1, "negation": 1, "projection": 2}
"""Kind of question -> fewest projections from a constant to the answer"""
MAX_OTHERS = 3
"""Most entities that a negation takes away from those that fulfil the rest."""
_THIRD = 0.3
"""Share of the intersections that are of three sets."""


class Sampler:
    def __init__(self, graph: Graph, rng: random.Random) -> None:
        self._graph, self._rng = graph, rng
        self._sources = {way: sorted(links) for way, links in graph.links.items()}
        self._makers: dict[str, Callable[[str, int], Query | None]] = {
            "chain": self._chain,
            "intersection": self._intersection,
            "union": self._union,
            "negation": self._negation,
            "projection": self._projection,
        }

    def draw(self, kind: str, depth: int, target: str) -> Query | None:
        """A query of so many hops; None if what was drawn did not fit together."""
        return self._makers[kind](target, depth)

    def _chain(self, target: str, depth: int, seen: frozenset[str] = frozenset()) -> Projection | None:
        """Projections of projections, without an entity twice on the way."""
        way, source = self._edge(target)
        seen |= {target}
        if source in seen:
            return None
        inner = Entity(source) if depth == 1 else self._chain(source, depth - 1, seen)
        return inner and Projection(*way, inner)

    def _edge(self, target: str) -> tuple[tuple[str, bool], str]:
        """A relation that leads to an entity, and whence."""
        ways = self._graph.around[target]
        way = self._rng.choice(list(ways))
        return way, self._rng.choice(ways[way])

    def _intersection(self, target: str, depth: int) -> Query | None:
        """The longest constraint has `depth` hops, the others so many at most."""
        depths = [depth, *(self._rng.randint(1, depth) for _ in range(2 if self._rng.random() < _THIRD else 1))]
        parts = [self._chain(target, each) for each in depths]
        found = tuple(part for part in parts if part is not None)
        return Intersection(found) if len(found) == len(set(found)) == len(parts) else None

    def _union(self, target: str, depth: int) -> Query | None:
        """A constraint, and another by one of two constants of which the second does not lead to the target."""
        (relation, forward), source = self._edge(target)
        other = self._rng.choice(self._sources[relation, forward])
        kept = self._chain(target, depth)
        if kept is None or target in self._graph.links[relation, forward][other]:
            return None
        either = Projection(relation, forward, Union((Entity(source), Entity(other))))
        return Intersection((kept, either))

    def _negation(self, target: str, depth: int) -> Query | None:
        """Few entities that fulfil one or two constraints, without those that have a property which the target has not,
        or one of two such."""
        kept = self._chain(target, depth) if self._rng.random() < 0.5 else self._intersection(target, depth)
        if kept is None:
            return None
        others = members(kept, self._graph) - {target}
        if not 1 <= len(others) <= MAX_OTHERS:
            return None
        removed: list[Query] = []
        while others:
            property_of_one = self._chain(min(others), 1)
            if property_of_one is None or len(removed) == 2:
                return None
            gone = members(property_of_one, self._graph)
            if target in gone:
                return None
            removed.append(property_of_one)
            others -= gone
        return Difference(kept, removed[0] if len(removed) == 1 else Union(tuple(removed)))

    def _projection(self, target: str, depth: int) -> Query | None:
        """A projection of an intersection of two."""
        way, source = self._edge(target)
        parts = [self._chain(source, depth - 1, frozenset({target})), self._chain(source, 1, frozenset({target}))]
        found = tuple(part for part in parts if part is not None)
        return Projection(*way, Intersection(found)) if len(set(found)) == 2 else None
