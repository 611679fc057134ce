"""What a question must not be: one with several answers, one with a shortcut, or one that names what is looked for."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from slimrl_tools.synthesis.graph import Graph
from slimrl_tools.synthesis.query import (
    Anything,
    Difference,
    Intersection,
    Projection,
    Query,
    Union,
    members,
)

from slimrl.rewards.answers import normal_form


def has_shortcut(query: Query, answer: str, graph: Graph) -> bool:
    """Whether the answer alone also follows from a query of which something was left out."""
    return any(members(weaker, graph) == {answer} for weaker in weaker_queries(query))


def weaker_queries(query: Query) -> Iterator[Query]:
    """Queries from which one thing was left out, anywhere in the tree.

    - What a projection is of: the relation leads from anything. Where a set of an intersection is not needed at all,
      this is not needed either.
    - A hop: what a projection is of stands in the projection's place. Where that is a constant, and is taken away from
      a set, nothing is taken away.

    A set that was united with others is not left out: where the answer is in only one of them, that one is enough, and
    a policy cannot know which it is before it has looked.
    """
    match query:
        case Projection(_, _, of):
            yield replace(query, of=Anything())
            yield of
            yield from (replace(query, of=weaker) for weaker in weaker_queries(of))
        case Intersection(parts):
            for place, part in enumerate(parts):
                others = parts[:place] + parts[place + 1 :]
                yield from (Intersection((weaker, *others)) for weaker in weaker_queries(part))
        case Union(parts):
            for place, part in enumerate(parts):
                others = parts[:place] + parts[place + 1 :]
                yield from (Union((weaker, *others)) for weaker in weaker_queries(part))
        case Difference(kept, removed):
            yield from (Difference(weaker, removed) for weaker in weaker_queries(kept))
            yield from (Difference(kept, weaker) for weaker in weaker_queries(removed))


def names_one(text: str, names: Iterable[str]) -> bool:
    """Whether one of the names occurs in a text, as whole words in normal form."""
    words = f" {normal_form(text)} "
    return any(f" {normal_form(name)} " in words for name in names)
