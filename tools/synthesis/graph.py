"""A graph of facts, read from a JSONL file of `{"subject": ..., "relation": ..., "object": ...}`."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import read_jsonl
from slimrl.rewards.answers import normal_form
from slimrl.rewards.labels import label_text

Triple = tuple[str, str, str]
"""Subject, relation, object"""
_KEYS = ("subject", "relation", "object")


@dataclass(frozen=True, slots=True)
class Fact:
    subject: str
    relation: str
    object: str
    text: str = ""
    """The sentence that says it; empty for one made of the relation's phrases"""
    line: int = 0
    """Its line in the file, from 1"""

    @property
    def triple(self) -> Triple:
        return self.subject, self.relation, self.object


class Graph:
    """
    Args:
        facts: different ones.
        sha256: of the file that they were read from.
    """

    def __init__(self, facts: Sequence[Fact], sha256: str = "") -> None:
        self.sha256 = sha256
        self.facts = {fact.triple: fact for fact in facts}
        self.relations = sorted({fact.relation for fact in facts})
        self.entities = frozenset(name for fact in facts for name in (fact.subject, fact.object))
        links: dict[tuple[str, bool], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for fact in facts:
            links[fact.relation, True][fact.subject].add(fact.object)
            links[fact.relation, False][fact.object].add(fact.subject)
        self.links = {way: {name: frozenset(ends) for name, ends in ways.items()} for way, ways in links.items()}
        self.around: dict[str, dict[tuple[str, bool], list[str]]] = defaultdict(dict)
        """Entity -> relation and whether it is followed forward -> the entities from which it leads to this one"""
        for (relation, forward), ways in self.links.items():
            for name, ends in ways.items():
                self.around[name][relation, not forward] = sorted(ends)

    @cached_property
    def answerable(self) -> list[str]:
        """The entities that can be the label of a prompt, and whose name is no other's in the reward's normal form."""
        named = Counter(map(normal_form, self.entities))
        return [name for name in sorted(self.entities) if named[normal_form(name)] == 1 and _is_label(name)]


def read_graph(file: Path) -> Graph:
    """
    Raises:
        ValueError: the file is missing, or a line is no fact or repeats one; names the lines.
    """
    lines: dict[Triple, int] = {}

    def parse(line: dict[str, Any], number: int) -> Fact:
        if unknown := line.keys() - {*_KEYS, "text"}:
            raise ValueError(f"has the unknown key {min(unknown)!r}; a fact has subject, relation, object and text")
        subject, relation, object_ = (_name(line, key) for key in _KEYS)
        fact = Fact(subject, relation, object_, text=_name(line, "text") if "text" in line else "", line=number)
        if (before := lines.setdefault(fact.triple, number)) != number:
            raise ValueError(f"repeats the fact of line {before}")
        return fact

    facts = read_jsonl(file, parse)
    return Graph(facts, hashlib.sha256(file.read_bytes()).hexdigest())


def _name(line: dict[str, Any], key: str) -> str:
    value = line.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f'"{key}" is {"missing" if value is None else repr(value)}; write a text')
    if value != " ".join(value.split()):
        raise ValueError(f'"{key}" is {value!r}; a text has single blanks, and none at its ends')
    return value


def _is_label(name: str) -> bool:
    try:
        label_text(name)
    except ValueError:
        return False
    return not set("{}\\") & set(name)
