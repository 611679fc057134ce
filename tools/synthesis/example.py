"""An example graph: facts about the made-up entities of `slimrl-tools search-data`, with phrases for its relations."""

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slimrl_tools.search.relations import RELATIONS
from slimrl_tools.search.world import World
from slimrl_tools.synthesis.graph import Fact
from slimrl_tools.synthesis.phrases import Phrase

from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

FACTS_PER_ENTITY = 4.3
"""Facts of which an entity of the world is the subject, on average."""

_SAID = {
    "birthplace": ("birthplace of {}", "was born in {}", "is the birthplace of {}"),
    "born": ("year of birth of {}", "was born in {}", "is the year of birth of {}"),
    "employer": ("employer of {}", "works for {}", "employs {}"),
    "teacher": ("teacher of {}", "was a pupil of {}", "taught {}"),
    "school": ("school of {}", "studied at {}", "is the school of {}"),
    "founder": ("founder of {}", "was founded by {}", "founded {}"),
    "seat": ("seat of {}", "has its seat in {}", "is the seat of {}"),
    "owner": ("owner of {}", "belongs to {}", "owns {}"),
    "founded": ("year of the foundation of {}", "was founded in {}", "is the year of the foundation of {}"),
    "mayor": ("mayor of {}", "is governed by {}", "is the mayor of {}"),
    "namesake": ("namesake of {}", "is named after {}", "is the namesake of {}"),
    "charter": ("year of the charter of {}", "got its charter in {}", "is the year of the charter of {}"),
    "place": ("location of {}", "stands in {}", "is the location of {}"),
    "head": ("head of {}", "is headed by {}", "is the head of {}"),
    "author": ("author of {}", "was written by {}", "wrote {}"),
    "publisher": ("publisher of {}", "was published by {}", "published {}"),
    "published": ("year of the publication of {}", "was published in {}", "is the year of the publication of {}"),
}
"""Relation -> noun, what is true of its subject, what is true of its object"""

PHRASES = {
    relation: Phrase(
        noun=noun,
        subject_is=subject,
        object_is=object_,
        subject=RELATIONS[relation].of,
        object=RELATIONS[relation].value,
    )
    for relation, (noun, subject, object_) in _SAID.items()
}


def write_example(out: Path, *, seed: int, num_facts: int) -> None:
    """Write `graph.jsonl` and `phrases.jsonl` into a new folder; the same seed gives the same files.

    Raises:
        ValueError: `out` exists, or there are too few facts, or more than there are names for.
    """
    rng = random.Random(seed)
    # The last entities' facts are too many; the names of the others do not depend on how many are left out.
    facts = list(_facts(World(round(1.1 * num_facts / FACTS_PER_ENTITY) + 1, rng), rng))
    rng.shuffle(facts)
    assert len(facts) >= num_facts
    with atomic_folder(out) as partial:
        lines = (
            {"subject": one.subject, "relation": one.relation, "object": one.object, "text": one.text}
            for one in facts[:num_facts]
        )
        write_lines(partial / "graph.jsonl", lines)
        phrases: list[dict[str, Any]] = [{"relation": name, **asdict(phrase)} for name, phrase in PHRASES.items()]
        write_lines(partial / "phrases.jsonl", phrases)


def _facts(world: World, rng: random.Random) -> Iterator[Fact]:
    for relation, values in world.facts.items():
        sentences = [one for one in RELATIONS[relation].sentences if "{s}" in one]
        for entity, value in values.items():
            name, said = world.names[entity], world.said(relation, value)
            yield Fact(name, relation, said, rng.choice(sentences).format(s=name, v=said))
