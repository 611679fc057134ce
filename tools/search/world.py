"""Made-up entities, what is true of them, and a passage about each of them."""

import random
from collections import defaultdict
from collections.abc import Iterator

from slimrl_tools.search.names import make_names
from slimrl_tools.search.relations import CONFUSED, FILLERS, INTRODUCTIONS, RELATIONS, SHARES, TRADES, YEAR

MIN_PASSAGES = 100
CONFUSED_SHARE = 0.4
"""Passages that name another entity with a part of the same name."""
FILLER_SHARE = 0.5
YEARS = (1700, 1960)


class World:
    """Entities are numbers, from 0; the passage of each has the same number.

    Args:
        num_passages: at least MIN_PASSAGES.

    Raises:
        ValueError: fewer passages, or more than there are names for.
    """

    def __init__(self, num_passages: int, rng: random.Random) -> None:
        if num_passages < MIN_PASSAGES:
            raise ValueError(f"{num_passages} passages are too few; use {MIN_PASSAGES} or more")
        counts = {kind: int(num_passages * share) for kind, share in SHARES.items()}
        counts["person"] += num_passages - sum(counts.values())
        names = make_names(rng, counts)
        entities = [(kind, name) for kind in counts for name in names[kind]]
        rng.shuffle(entities)
        self.kinds = [kind for kind, _ in entities]
        self.names = [name for _, name in entities]
        self.of_kind: dict[str, list[int]] = defaultdict(list)
        for entity, kind in enumerate(self.kinds):
            self.of_kind[kind].append(entity)
        self.facts = {relation: self._drawn(relation, rng) for relation in RELATIONS}
        """Relation -> entity -> another entity, or a year"""

    def __len__(self) -> int:
        return len(self.names)

    def _drawn(self, relation: str, rng: random.Random) -> dict[int, int]:
        kind = RELATIONS[relation]
        values = range(*YEARS) if kind.value == YEAR else self.of_kind[kind.value]
        facts = {}
        for entity in self.of_kind[kind.of]:
            value = rng.choice(values)
            # Nobody is the own teacher. Years are no entities, whatever their number.
            while kind.value != YEAR and value == entity:
                value = rng.choice(values)
            facts[entity] = value
        return facts

    def said(self, relation: str, value: int) -> str:
        """A value as passages and labels have it."""
        return str(value) if RELATIONS[relation].value == YEAR else self.names[value]


def passage_id(entity: int) -> str:
    return f"p{entity}"


def passages(world: World, rng: random.Random) -> Iterator[str]:
    """A passage about each entity: all that is known of it in any order, and often a name that resembles its own."""
    relations = {kind: [name for name, one in RELATIONS.items() if one.of == kind] for kind in SHARES}
    similar = _by_word(world)
    for entity, (kind, name) in enumerate(zip(world.kinds, world.names, strict=True)):
        pronoun = rng.choice(("He", "She")) if kind == "person" else "It"
        known = relations[kind].copy()
        rng.shuffle(known)
        parts = [
            rng.choice(RELATIONS[one].sentences).format(
                s=rng.choice((name, pronoun, pronoun)), v=world.said(one, world.facts[one][entity])
            )
            for one in known
        ]
        if rng.random() < CONFUSED_SHARE and (others := similar[kind, rng.choice(name.split())]):
            other = rng.choice(others)
            if other != entity:
                parts.append(rng.choice(CONFUSED).format(n=name, o=world.names[other]))
        if rng.random() < FILLER_SHARE:
            parts.insert(rng.randrange(len(parts)), rng.choice(FILLERS))
        what = rng.choice(TRADES) if kind == "person" else rng.randrange(40, 900)
        yield " ".join([rng.choice(INTRODUCTIONS[kind]).format(n=name, w=what), *parts])


def _by_word(world: World) -> dict[tuple[str, str], list[int]]:
    """Kind and word -> the entities with that word in their names."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for entity, (kind, name) in enumerate(zip(world.kinds, world.names, strict=True)):
        for word in set(name.split()):
            found[kind, word].append(entity)
    return found
