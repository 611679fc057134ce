"""Questions in English, from the phrases of their relations.

The constraint that names the most comes last, so that what follows a name within it cannot be taken for another
constraint of what is asked; where two name more than a constant, `and also` begins the second.
"""

from collections.abc import Mapping

from slimrl_tools.synthesis.graph import Fact, Graph
from slimrl_tools.synthesis.phrases import PERSON, Phrase
from slimrl_tools.synthesis.query import Difference, Entity, Intersection, Projection, Query, Union, depth, members

Phrases = Mapping[str, Phrase]


class Renderer:
    """
    Args:
        graph: says whether something is the only one.
        phrases: of all relations of the graph.
    """

    def __init__(self, graph: Graph, phrases: Phrases) -> None:
        self._graph, self._phrases = graph, phrases

    def question(self, query: Query) -> str:
        """A question for the one member of a query, which is no constant."""
        kept, removed = (query.kept, query.removed) if isinstance(query, Difference) else (query, None)
        kind = self._kind(kept)
        asked = {PERSON: "Who", "thing": "What"}.get(kind, f"Which {kind}")
        said = f"{asked} {self._all_of(kept)}"
        if removed is not None:
            out = [self._removed(part) for part in _parts(removed, Union)]
            said += f", but is {'not' if len(out) == 1 else 'neither'} {' nor '.join(out)}"
        return f"{said}?"

    def search(self, query: Query, names: Mapping[Query, str]) -> str:
        """Words to search for the members of a query with, where those of the queries in it are known.

        Args:
            names: what is known to be meant by queries other than constants.
        """
        said = []
        for part in _parts(query, Intersection):
            assert isinstance(part, Projection)
            phrase, name = self._phrases[part.relation], names.get(part.of) or self._name(part.of)
            said.append(phrase.noun.replace("{}", name) if part.forward else phrase.subject_is.replace("{}", name))
        return " and ".join(said)

    def _removed(self, query: Query) -> str:
        forward = isinstance(query, Projection) and query.forward
        return self._name(query) if forward else self._described(query, "a")

    def _all_of(self, query: Query) -> str:
        parts = sorted(_parts(query, Intersection), key=_names_more)
        said = [self._predicate(part) for part in parts]
        if len(said) == 1:
            return said[0]
        joint = ", and also " if depth(parts[-2]) > 1 else " and "
        return f"{', '.join(said[:-1])}{joint}{said[-1]}"

    def _predicate(self, query: Query) -> str:
        """What is true of the members of a projection."""
        assert isinstance(query, Projection)
        return self._phrases[query.relation].predicate(query.forward, self._name(query.of))

    def _name(self, query: Query) -> str:
        """A set as a noun."""
        match query:
            case Entity(name):
                return name
            case Union(parts):
                return f"either {' or '.join(self._name(part) for part in sorted(parts, key=repr))}"
            case _:
                return self._described(query, "the" if len(members(query, self._graph)) == 1 else "a")

    def _described(self, query: Query, article: str) -> str:
        """A set, which is no constant, as a noun with an article."""
        if isinstance(query, Projection) and query.forward:
            noun = self._phrases[query.relation].noun.replace("{}", self._name(query.of))
        else:
            kind, both = self._kind(query), "both " if isinstance(query, Intersection) else ""
            noun = f"{kind} {'who' if kind == PERSON else 'that'} {both}{self._all_of(query)}"
        return f"{'an' if article == 'a' and noun[0] in 'aeiouAEIOU' else article} {noun}"

    def _kind(self, query: Query) -> str:
        first = _parts(query, Intersection)[0]
        assert isinstance(first, Projection)
        return self._phrases[first.relation].kind(first.forward)


def sentence(fact: Fact, phrases: Phrases) -> str:
    """A fact in words."""
    return fact.text or f"{fact.subject} {phrases[fact.relation].predicate(False, fact.object)}."


def _parts(query: Query, kind: type[Intersection] | type[Union]) -> tuple[Query, ...]:
    return query.parts if isinstance(query, kind) else (query,)


def _names_more(query: Query) -> tuple[int, bool]:
    return depth(query), isinstance(query, Projection) and isinstance(query.of, Union)
