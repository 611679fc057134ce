"""The search task: questions over a corpus of made-up facts, and conversations for the cold start.

People have a mother, a place of birth and an employer; companies have a founder and a seat. A question needs one fact,
or two of which the first one leads to the second. The demonstrations search for the right facts, or stop at the first,
or search for a name alone, or guess, with the probabilities of BEHAVIOURS. All but those that guess answer what a
passage says, so a model that imitates them can do both searches and read what they find, and mostly does not.

The demonstrations are of other facts than the corpus, about the same names, and of others again every
CONVERSATIONS_PER_WORLD: nothing but an answer of the tool says what is true.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from slimrl_tools.toy.task_lines import asked, call

from slimrl.agent.retrieval.bm25 import Bm25Index
from slimrl.agent.retrieval.passages import Passage
from slimrl.agent.search import answer, search
from slimrl.agent.tools import make_tool
from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

SYLLABLES = ("ba", "de", "fi", "go", "ku", "me", "no", "ra")
NUM_FIRST, NUM_LAST, NUM_TOWNS, NUM_COMPANY_WORDS = 12, 12, 10, 10
COMPANY_KINDS = ("Mills", "Works", "Bank", "Press", "Foods")
NUM_PEOPLE = 120
CONVERSATIONS_PER_WORLD = 60
NUM_RESULTS = 3
"""Passages in an answer, as `agent.tool_args.num_results` of the task's recipe says."""

BEHAVIOURS = {
    1: {"right": 0.5, "name_only": 0.25, "guess": 0.25},
    2: {"right": 0.3, "first_only": 0.3, "name_only": 0.2, "guess": 0.2},
}
"""Probabilities of the demonstrations' behaviours, by the number of facts that a question needs."""


@dataclass(frozen=True, kw_only=True)
class Relation:
    """Something that is known of each person, or of each company."""

    of: str
    value: str
    """What it leads to"""
    question: str
    """`{}` stands for a name, or for `inner` of another relation."""
    inner: str = ""
    """What leads to the value, within a question; empty if nothing is asked of it"""


RELATIONS = {
    "mother": Relation(of="person", value="person", question="Who is the mother of {}?", inner="the mother of {}"),
    "birthplace": Relation(of="person", value="town", question="Where was {} born?"),
    "employer": Relation(of="person", value="company", question="Which company does {} work for?",
                         inner="the company that {} works for"),
    "founder": Relation(of="company", value="person", question="Who founded {}?", inner="the person who founded {}"),
    "seat": Relation(of="company", value="town", question="In which town is {}?"),
}  # fmt: skip


Names = dict[str, list[str]]
"""Kind (person, company, town) -> the names of that kind"""


def make_names(rng: random.Random) -> Names:
    words = ["".join(pair).capitalize() for pair in product(SYLLABLES, repeat=2)]
    rng.shuffle(words)
    first, last, towns, heads = (
        [words.pop() for _ in range(count)] for count in (NUM_FIRST, NUM_LAST, NUM_TOWNS, NUM_COMPANY_WORDS)
    )
    people = rng.sample([f"{one} {two}" for one, two in product(first, last)], NUM_PEOPLE)
    companies = [f"{head} {kind}" for head, kind in product(heads, COMPANY_KINDS)]
    return {"person": people, "company": companies, "town": towns}


class World:
    """What is true of people and companies."""

    def __init__(self, names: Names, rng: random.Random) -> None:
        self.names = names
        self.facts = {
            (relation, name): rng.choice([value for value in self.names[kind.value] if value != name])
            for relation, kind in RELATIONS.items()
            for name in self.names[kind.of]
        }

    def passages(self) -> list[str]:
        return [f"The {relation} of {name} is {value}." for (relation, name), value in self.facts.items()]

    def questions(self) -> "list[Question]":
        found = []
        for (relation, name), value in self.facts.items():
            kind = RELATIONS[relation]
            found.append(Question(text=kind.question.format(name), name=name, path=(relation,), values=(value,)))
            for second, other in RELATIONS.items():
                if kind.inner and other.of == kind.value:
                    text = other.question.format(kind.inner.format(name))
                    values = (value, self.facts[second, value])
                    found.append(Question(text=text, name=name, path=(relation, second), values=values))
        return found


@dataclass(frozen=True, kw_only=True)
class Question:
    text: str
    name: str
    """The person or company that it is about"""
    path: tuple[str, ...]
    """The relations that lead to the answer"""
    values: tuple[str, ...]
    """What each of them leads to; the last one is the answer"""


def write_search_data(out: Path, *, seed: int, num_train: int, num_heldout: int, num_conversations: int) -> None:
    """Write `corpus.jsonl`, `train.jsonl`, `heldout.jsonl` (prompts) and `sft.jsonl` (conversations) into a new folder.

    The same seed gives the same files. Half of the questions need two facts. Nobody whom a question of `heldout.jsonl`
    is about is in a question of the other two.

    Raises:
        ValueError: `out` exists.
    """
    with atomic_folder(out) as partial:
        rng = random.Random(seed)
        names = make_names(rng)
        world = World(names, rng)
        write_lines(partial / "corpus.jsonl", ({"text": text} for text in world.passages()))
        new = {name for kind in ("person", "company") for name in names[kind] if rng.random() < 0.2}
        known, heldout = ([one for one in world.questions() if (one.name in new) is held] for held in (False, True))
        write_lines(partial / "heldout.jsonl", map(_prompt_line, _drawn(heldout, num_heldout, rng)))
        write_lines(partial / "train.jsonl", map(_prompt_line, _drawn(known, num_train, rng)))
        write_lines(partial / "sft.jsonl", _conversations(names, new, num_conversations, rng))


def _conversations(names: Names, new: set[str], count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Demonstrations, none of them about one of the `new` names."""
    for first in range(0, count, CONVERSATIONS_PER_WORLD):
        world = World(names, rng)
        index = Bm25Index.build([Passage(text) for text in world.passages()])
        known = [one for one in world.questions() if one.name not in new]
        for question in _drawn(known, min(CONVERSATIONS_PER_WORLD, count - first), rng):
            yield _conversation(question, world, index, rng)


def _drawn(questions: Sequence[Question], count: int, rng: random.Random) -> list[Question]:
    """So many questions, half of them with two facts; each of them as often as the others, or once more."""
    found: list[Question] = []
    for length, share in ((1, count // 2), (2, count - count // 2)):
        fitting = [one for one in questions if len(one.path) == length]
        times, more = divmod(share, len(fitting))
        found += times * fitting + rng.sample(fitting, more)
    rng.shuffle(found)
    return found


def _prompt_line(question: Question) -> dict[str, Any]:
    return {"prompt": question.text, "label": question.values[-1], "metadata": {"facts": len(question.path)}}


def _conversation(question: Question, world: World, index: Bm25Index, rng: random.Random) -> dict[str, Any]:
    weights = BEHAVIOURS[len(question.path)]
    behaviour = rng.choices(list(weights), list(weights.values()))[0]
    turns = _DEMONSTRATIONS[behaviour](question, world, index, rng)
    return {"messages": asked(question.text) + list(turns), "tools": [_schema()]}


Turns = Iterator[dict[str, Any]]


def _right(question: Question, world: World, index: Bm25Index, rng: random.Random) -> Turns:
    name = question.name
    for relation, value in zip(question.path, question.values, strict=True):
        yield from _search(f"{relation} of {name}", index)
        name = value
    yield _answer(name)


def _first_only(question: Question, world: World, index: Bm25Index, rng: random.Random) -> Turns:
    yield from _search(f"{question.path[0]} of {question.name}", index)
    yield _answer(question.values[0])


def _name_only(question: Question, world: World, index: Bm25Index, rng: random.Random) -> Turns:
    """The answer is what the first passage says, whatever was asked."""
    yield from _search(query := f"about {question.name}", index)
    first = index.find(query, NUM_RESULTS)[0]
    yield _answer(first.removesuffix(".").partition(" is ")[2])


def _guess(question: Question, world: World, index: Bm25Index, rng: random.Random) -> Turns:
    kind = RELATIONS[question.path[-1]].value
    yield _answer(rng.choice([name for name in world.names[kind] if name != question.values[-1]]))


_DEMONSTRATIONS: dict[str, Callable[[Question, World, Bm25Index, random.Random], Turns]] = {
    "right": _right,
    "first_only": _first_only,
    "name_only": _name_only,
    "guess": _guess,
}


@cache
def _schema() -> dict[str, Any]:
    return make_tool(search, {"corpus": "", "num_results": NUM_RESULTS}).schema


def _search(query: str, index: Bm25Index) -> Turns:
    yield call("search", query=query)
    yield {"role": "tool", "content": answer(index, query, NUM_RESULTS)}


def _answer(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is \\boxed{{ {value} }}."}
