"""Queries over a graph of facts as trees of sets, after the knowledge projections of WebShaper (arXiv:2507.15061).

- A constant is the set of one entity.
- A projection is the set of all entities to which a relation leads from a set: forward from subjects to objects, or
  backward from objects to subjects. A set of several entities is projected as the union of what each leads to.
- Sets are intersected, united, and taken from each other. What is not in the graph is not true.

A question asks for the one member of the set of the whole tree.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Entity:
    name: str


@dataclass(frozen=True, slots=True)
class Anything:
    """All entities; only in queries from which something was left out."""


@dataclass(frozen=True, slots=True)
class Projection:
    relation: str
    forward: bool
    of: "Query"


@dataclass(frozen=True, slots=True)
class Intersection:
    parts: tuple["Query", ...]


@dataclass(frozen=True, slots=True)
class Union:
    parts: tuple["Query", ...]


@dataclass(frozen=True, slots=True)
class Difference:
    kept: "Query"
    removed: "Query"


type Query = Entity | Anything | Projection | Intersection | Union | Difference


class Facts(Protocol):
    """What a query is evaluated on."""

    @property
    def entities(self) -> frozenset[str]: ...

    @property
    def links(self) -> Mapping[tuple[str, bool], Mapping[str, frozenset[str]]]:
        """Relation and whether it is followed forward -> entity -> those to which it leads"""


def members(query: Query, facts: Facts) -> frozenset[str]:
    """The set that a query describes."""
    match query:
        case Entity(name):
            return frozenset((name,))
        case Anything():
            return facts.entities
        case Projection(relation, forward, of):
            links = facts.links.get((relation, forward), {})
            sources = links if isinstance(of, Anything) else members(of, facts) & links.keys()
            return frozenset().union(*(links[source] for source in sources))
        case Intersection(parts):
            return frozenset.intersection(*(members(part, facts) for part in parts))
        case Union(parts):
            return frozenset().union(*(members(part, facts) for part in parts))
        case Difference(kept, removed):
            return members(kept, facts) - members(removed, facts)


def below(query: Query) -> tuple[Query, ...]:
    """The queries of which a query is directly made."""
    match query:
        case Projection(_, _, of):
            return (of,)
        case Intersection(parts) | Union(parts):
            return parts
        case Difference(kept, removed):
            return (kept, removed)
        case _:
            return ()


def whole(query: Query) -> Iterator[Query]:
    """A query and all that it is made of."""
    yield query
    for part in below(query):
        yield from whole(part)


def constants(query: Query) -> set[str]:
    """Names of the entities that a query names."""
    return {one.name for one in whole(query) if isinstance(one, Entity)}


def depth(query: Query) -> int:
    """Most projections from a constant to the set of the whole query."""
    return max(map(depth, below(query)), default=0) + isinstance(query, Projection)


def as_json(query: Query) -> Any:
    """A query as JSON, the same for queries that differ in the order of what is intersected or united."""
    match query:
        case Entity(name):
            return {"entity": name}
        case Projection(relation, forward, of):
            return {"relation": relation, "direction": "forward" if forward else "backward", "of": as_json(of)}
        case Intersection(parts):
            return {"and": _ordered(parts)}
        case Union(parts):
            return {"or": _ordered(parts)}
        case Difference(kept, removed):
            return {"from": as_json(kept), "without": as_json(removed)}
        case Anything():
            raise AssertionError("a question leaves nothing out")


def _ordered(parts: tuple[Query, ...]) -> list[Any]:
    return sorted((as_json(part) for part in parts), key=lambda part: json.dumps(part, sort_keys=True))
