"""The facts from which the answer of a query follows."""

from collections.abc import Iterator
from dataclasses import dataclass

from slimrl_tools.synthesis.graph import Graph, Triple
from slimrl_tools.synthesis.query import Difference, Intersection, Projection, Query, Union, members


@dataclass(frozen=True, slots=True)
class Proof:
    facts: tuple[Triple, ...]
    """In the order in which they are found, each once"""
    found: frozenset[str]
    """The entities to which the facts lead: the answer, those on the way to it, and those that a negation rules out"""


def proof(query: Query, answer: str, graph: Graph) -> Proof:
    """Facts that make `answer` a member of a query; where something is taken away, also those by which others are."""
    steps = list(_steps(query, answer, graph))
    return Proof(tuple(dict.fromkeys(fact for fact, _ in steps)), frozenset(end for _, end in steps))


def _steps(query: Query, answer: str, graph: Graph) -> Iterator[tuple[Triple, str]]:
    """Facts, each with the entity to which it leads."""
    match query:
        case Projection(relation, forward, of):
            source = witness(query, answer, graph)
            yield from _steps(of, source, graph)
            yield ((source, relation, answer) if forward else (answer, relation, source)), answer
        case Intersection(parts):
            for part in parts:
                yield from _steps(part, answer, graph)
        case Union(parts):
            yield from _steps(next(part for part in parts if answer in members(part, graph)), answer, graph)
        case Difference(kept, removed):
            yield from _steps(kept, answer, graph)
            for other in sorted(members(kept, graph) & members(removed, graph)):
                yield from _steps(removed, other, graph)


def witness(projection: Projection, answer: str, graph: Graph) -> str:
    """The first entity, by name, from which a projection leads to one of its members."""
    leading = graph.links[projection.relation, not projection.forward][answer]
    return min(leading & members(projection.of, graph))
