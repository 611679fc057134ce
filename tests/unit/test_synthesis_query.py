"""Queries over graphs of facts: each operator on a graph of a few facts, and random ones by brute force."""

import random

import pytest
from slimrl_tools.synthesis.filters import has_shortcut
from slimrl_tools.synthesis.graph import Fact, Graph
from slimrl_tools.synthesis.proof import proof
from slimrl_tools.synthesis.query import (
    Difference,
    Entity,
    Intersection,
    Projection,
    Query,
    Union,
    as_json,
    constants,
    depth,
    members,
)
from slimrl_tools.synthesis.solver import Solver

FAMILY = [
    ("Ann", "mother", "Eve"),
    ("Bob", "mother", "Eve"),
    ("Cid", "mother", "Fay"),
    ("Ann", "lives_in", "Rome"),
    ("Bob", "lives_in", "Oslo"),
    ("Cid", "lives_in", "Rome"),
    ("Eve", "lives_in", "Oslo"),
]
MOTHER_OF = Projection("mother", True, Entity("Ann"))
CHILDREN = Projection("mother", False, Entity("Eve"))
TOWN_OF_MOTHER = Projection("lives_in", True, MOTHER_OF)
ROMANS, IN_OSLO = (Projection("lives_in", False, Entity(town)) for town in ("Rome", "Oslo"))


def graph_of(triples) -> Graph:
    return Graph([Fact(*triple) for triple in triples])


@pytest.mark.parametrize(
    ("query", "expected", "hops"),
    [
        (Entity("Ann"), {"Ann"}, 0),
        (MOTHER_OF, {"Eve"}, 1),
        (CHILDREN, {"Ann", "Bob"}, 1),
        (Projection("lives_in", True, CHILDREN), {"Rome", "Oslo"}, 2),
        (Projection("mother", False, Entity("Rome")), set(), 1),
        (Projection("mother", True, Union((Entity("Ann"), Entity("Cid")))), {"Eve", "Fay"}, 1),
        (Intersection((CHILDREN, ROMANS)), {"Ann"}, 1),
        (Union((CHILDREN, ROMANS)), {"Ann", "Bob", "Cid"}, 1),
        (Difference(CHILDREN, ROMANS), {"Bob"}, 1),
        (Difference(CHILDREN, Union((ROMANS, IN_OSLO))), set(), 1),
        (Projection("mother", True, Intersection((CHILDREN, ROMANS))), {"Eve"}, 2),
    ],
)
def test_operators_on_a_graph_of_seven_facts(query, expected, hops):
    assert members(query, graph_of(FAMILY)) == expected
    with Solver(FAMILY) as solver:
        assert solver.answers(query) == expected
    assert depth(query) == hops


def random_query(rng: random.Random, names: list[str], levels: int) -> Query:
    if levels == 0:
        return Entity(rng.choice(names))
    inner = [random_query(rng, names, levels - 1) for _ in range(3)]
    return rng.choice(
        [
            Projection(rng.choice("rst"), rng.random() < 0.5, inner[0]),
            Projection(rng.choice("rst"), rng.random() < 0.5, inner[0]),
            Intersection(tuple(inner[: rng.randint(2, 3)])),
            Union(tuple(inner[: rng.randint(2, 3)])),
            Difference(inner[0], inner[1]),
        ]
    )


def is_member(name: str, query: Query, triples: set) -> bool:
    """By going through all facts, for one entity at a time."""
    match query:
        case Entity(constant):
            return name == constant
        case Projection(relation, forward, of):
            ends = [(s, o) if forward else (o, s) for s, r, o in triples if r == relation]
            return any(end == name and is_member(source, of, triples) for source, end in ends)
        case Intersection(parts):
            return all(is_member(name, part, triples) for part in parts)
        case Union(parts):
            return any(is_member(name, part, triples) for part in parts)
        case Difference(kept, removed):
            return is_member(name, kept, triples) and not is_member(name, removed, triples)


def test_random_queries_have_the_members_that_brute_force_finds_and_both_solvers_agree():
    rng = random.Random(0)
    sizes = []
    for _ in range(30):
        names = [f"e{number}" for number in range(9)]
        triples = {(rng.choice(names), rng.choice("rst"), rng.choice(names)) for _ in range(24)}
        graph = graph_of(sorted(triples))
        with Solver(triples) as solver:
            for _ in range(12):
                query = random_query(rng, sorted(graph.entities), 3)
                expected = {name for name in graph.entities if is_member(name, query, triples)}
                assert members(query, graph) == expected
                assert solver.answers(query) == expected
                sizes.append(len(expected))
    assert len([size for size in sizes if 0 < size < 9]) > 120


def test_the_facts_of_a_proof_alone_prove_the_answer():
    rng = random.Random(1)
    proved = 0
    while proved < 150:
        names = [f"e{number}" for number in range(9)]
        graph = graph_of({(rng.choice(names), rng.choice("rst"), rng.choice(names)) for _ in range(24)})
        query = random_query(rng, sorted(graph.entities), 2)
        for answer in members(query, graph):
            shown = proof(query, answer, graph)
            assert set(shown.facts) <= graph.facts.keys()
            assert is_member(answer, query, set(shown.facts))
            assert {name for s, _, o in shown.facts for name in (s, o)} <= shown.found | constants(query)
            proved += len(shown.facts) > 0


def test_a_proof_of_a_negation_rules_out_the_others():
    shown = proof(Difference(CHILDREN, ROMANS), "Bob", graph_of(FAMILY))
    assert shown.facts == (("Bob", "mother", "Eve"), ("Ann", "lives_in", "Rome"))
    assert shown.found == {"Bob", "Ann"}


def test_the_order_of_what_is_intersected_or_united_makes_no_other_question():
    one, other = Intersection((CHILDREN, Union((ROMANS, IN_OSLO)))), Intersection((Union((IN_OSLO, ROMANS)), CHILDREN))
    assert as_json(one) == as_json(other)
    assert as_json(Difference(CHILDREN, ROMANS)) != as_json(Difference(ROMANS, CHILDREN))
    assert as_json(Projection("mother", False, Entity("Eve"))) != as_json(Projection("mother", True, Entity("Eve")))


SHORT = [
    # Everybody has one mother, so nobody needs to know whose mother is asked for.
    (MOTHER_OF, "Eve", [("Ann", "mother", "Eve"), ("Bob", "mother", "Eve")]),
    # A second constraint that says nothing new.
    (Intersection((CHILDREN, ROMANS)), "Ann", [("Ann", "mother", "Eve"), ("Ann", "lives_in", "Rome"),
                                               ("Cid", "lives_in", "Rome")]),
    # The town of Ann's mother is Ann's own: the first hop can be left out.
    (TOWN_OF_MOTHER, "Rome", [*FAMILY[:6], ("Eve", "lives_in", "Rome"), ("Fay", "lives_in", "Bonn")]),
    # Nothing is taken away.
    (Difference(CHILDREN, ROMANS), "Bob", [*FAMILY[1:3], ("Bob", "lives_in", "Oslo"), ("Cid", "lives_in", "Oslo"),
                                           ("Ann", "lives_in", "Rome")]),
    # Whoever has a mother and lives elsewhere is Bob.
    (Difference(CHILDREN, ROMANS), "Bob", FAMILY),
    # Only one of them has a town at all, whichever it is.
    (Difference(CHILDREN, ROMANS), "Bob", [*FAMILY[:4], ("Cid", "lives_in", "Oslo")]),
]  # fmt: skip


@pytest.mark.parametrize(("query", "answer", "triples"), SHORT)
def test_an_answer_that_follows_from_less_is_a_shortcut(query, answer, triples):
    graph = graph_of(triples)
    assert members(query, graph) == {answer}
    assert has_shortcut(query, answer, graph)


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        (MOTHER_OF, "Eve"),
        (Intersection((CHILDREN, ROMANS)), "Ann"),
        (Difference(CHILDREN, ROMANS), "Bob"),
        (TOWN_OF_MOTHER, "Oslo"),
    ],
)
def test_what_needs_all_of_its_parts_is_no_shortcut(query, answer):
    graph = graph_of([*FAMILY, ("Fay", "lives_in", "Bonn"), ("Dan", "mother", "Fay"), ("Dan", "lives_in", "Oslo")])
    assert members(query, graph) == {answer}
    assert not has_shortcut(query, answer, graph)
