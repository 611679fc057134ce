"""Questions whose answers follow from the facts of a world, and from no fewer passages than they name.

- `one`, `two`, `three`: that many facts, of which each leads to the next.
- `comparison`: which of two came first.
- `intersection`: the only person with two properties.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slimrl_tools.progress import count_progress
from slimrl_tools.search.relations import RELATIONS, YEAR
from slimrl_tools.search.world import World

HOPS = {"one": 1, "two": 2, "three": 3, "comparison": 2, "intersection": 1}
"""Kind of question -> passages that it needs"""
SHARES = {"one": 0.2, "two": 0.3, "three": 0.2, "comparison": 0.15, "intersection": 0.15}
MAX_TRIES = 2000
"""Draws in a row of which none is a question that may be taken."""
_LEADING = [name for name, relation in RELATIONS.items() if relation.value != YEAR]
_YEARS = [name for name, relation in RELATIONS.items() if relation.value == YEAR]
_PROPERTIES = {"birthplace": "was born in", "school": "studied at", "employer": "works for"}
"""Relation -> what people who share its value have done, in questions for an intersection"""


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: str
    text: str
    answer: str
    relations: tuple[str, ...]
    supporting: tuple[int, ...]
    """Entities whose passages say the facts, in the order in which they are needed"""
    entities: frozenset[int]
    """All that it is about: those, what the facts lead to, and what is asked"""


class Questions:
    """Draws questions.

    Args:
        rng: where all of them come from.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self._texts: set[str] = set()
        self._having: dict[tuple[str, int], set[int]] = defaultdict(set)
        for relation in _PROPERTIES:
            for person, value in world.facts[relation].items():
                self._having[relation, value].add(person)
        self._makers: dict[str, Callable[[], Question | None]] = {
            "one": partial(self._chain, "one"),
            "two": partial(self._chain, "two"),
            "three": partial(self._chain, "three"),
            "comparison": self._comparison,
            "intersection": self._intersection,
        }

    def draw(self, count: int, avoided: frozenset[int]) -> list[Question]:
        """So many questions, no text twice, by the shares of their kinds.

        Args:
            avoided: entities that none of them may be about.

        Raises:
            ValueError: the world has not so many.
        """
        kinds = self._rng.choices(list(SHARES), list(SHARES.values()), k=count)
        drawn = []
        with count_progress("questions", count, "questions") as advance:
            for kind in kinds:
                drawn.append(self._new(kind, avoided))
                advance(1)
        return drawn

    def _new(self, kind: str, avoided: frozenset[int]) -> Question:
        for _ in range(MAX_TRIES):
            found = self._makers[kind]()
            if found is not None and found.text not in self._texts and not found.entities & avoided:
                self._texts.add(found.text)
                return found
        raise ValueError(f"{len(self._world)} passages are too few for so many questions; use more or ask fewer")

    def _chain(self, kind: str) -> Question | None:
        """None if an entity would occur twice."""
        world, length = self._world, HOPS[kind]
        entity = start = self._rng.randrange(len(world))
        path: list[str] = []
        supporting: list[int] = []
        for step in range(length):
            allowed = [*_LEADING, *_YEARS] if step == length - 1 else _LEADING
            relation = self._rng.choice([name for name in allowed if RELATIONS[name].of == world.kinds[entity]])
            path.append(relation)
            supporting.append(entity)
            entity = world.facts[relation][entity]
        reached = [*supporting] if path[-1] in _YEARS else [*supporting, entity]
        if len(set(reached)) < len(reached):
            return None
        return Question(
            kind=kind, text=chain_text(path, world.names[start]), answer=world.said(path[-1], entity),
            relations=tuple(path), supporting=tuple(supporting), entities=frozenset(reached),
        )  # fmt: skip

    def _comparison(self) -> Question | None:
        """None if both came in one year."""
        relation = self._rng.choice(_YEARS)
        years = self._world.facts[relation]
        pair = self._rng.sample(self._world.of_kind[RELATIONS[relation].of], 2)
        if years[pair[0]] == years[pair[1]]:
            return None
        names = [self._world.names[one] for one in pair]
        return Question(
            kind="comparison", text=RELATIONS[relation].earlier.format(*names),
            answer=self._world.names[min(pair, key=years.__getitem__)],
            relations=(relation, relation), supporting=tuple(pair), entities=frozenset(pair),
        )  # fmt: skip

    def _intersection(self) -> Question | None:
        """None if several people have both properties."""
        person = self._rng.choice(self._world.of_kind["person"])
        first, second = self._rng.sample(sorted(_PROPERTIES), 2)
        values = [self._world.facts[relation][person] for relation in (first, second)]
        if self._having[first, values[0]] & self._having[second, values[1]] != {person}:
            return None
        said = " and ".join(
            f"{_PROPERTIES[relation]} {self._world.names[value]}"
            for relation, value in zip((first, second), values, strict=True)
        )
        return Question(
            kind="intersection", text=f"Who {said}?", answer=self._world.names[person],
            relations=(first, second), supporting=(person,), entities=frozenset((person, *values)),
        )  # fmt: skip


def chain_text(path: Sequence[str], name: str) -> str:
    """The question that follows relations from a name, the first one innermost."""
    for relation in path[:-1]:
        name = RELATIONS[relation].inner.format(name)
    return RELATIONS[path[-1]].question.format(name)
