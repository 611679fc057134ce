"""The facts from which the answer of a query follows."""

from slimrl_tools.synthesis.graph import Graph, Triple
from slimrl_tools.synthesis.query import Difference, Intersection, Projection, Query, Union, members


def proof(query: Query, answer: str, graph: Graph) -> list[Triple]:
    """Facts that make `answer` a member of a query, in the order in which they are found, each once.

    Where something is taken away, they are also the facts by which all other members are.
    """
    return list(dict.fromkeys(_facts(query, answer, graph)))


def _facts(query: Query, answer: str, graph: Graph) -> list[Triple]:
    match query:
        case Projection(relation, forward, of):
            source = witness(query, answer, graph)
            fact = (source, relation, answer) if forward else (answer, relation, source)
            return [*_facts(of, source, graph), fact]
        case Intersection(parts):
            return [fact for part in parts for fact in _facts(part, answer, graph)]
        case Union(parts):
            return _facts(next(part for part in parts if answer in members(part, graph)), answer, graph)
        case Difference(kept, removed):
            others = sorted(members(kept, graph) - {answer})
            gone = [other for other in others if other in members(removed, graph)]
            return [*_facts(kept, answer, graph), *(fact for other in gone for fact in _facts(removed, other, graph))]
        case _:
            return []


def witness(projection: Projection, answer: str, graph: Graph) -> str:
    """The first entity, by name, from which a projection leads to one of its members."""
    leading = graph.links[projection.relation, not projection.forward][answer]
    return min(leading & members(projection.of, graph))
