"""How questions say a relation. `{}` stands for the entity from which it is followed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.base.jsonl import read_jsonl
from slimrl.config.problems import suggestion

_ARTICLE = re.compile(r"\b(the|an?) \{\}", re.IGNORECASE)
PERSON = "person"
"""The kind of entity that is asked for with `who`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    noun: str
    """The object, without article: `founder of {}`, `year in which {} was born`"""
    subject_is: str
    """What is true of the subject: `was founded by {}`"""
    object_is: str
    """What is true of the object: `founded {}`"""
    subject: str = "thing"
    """Kind of the subjects"""
    object: str = "thing"
    """Kind of the objects"""

    def predicate(self, forward: bool, name: str) -> str:
        """What is true of all to which the relation leads."""
        return (self.object_is if forward else self.subject_is).replace("{}", name)

    def kind(self, forward: bool) -> str:
        return self.object if forward else self.subject


def plain_phrase(relation: str) -> Phrase:
    """How a relation is said of which nothing is known but its name."""
    noun = relation.replace("_", " ")
    return Phrase(noun=f"{noun} of {{}}", subject_is=f"has as its {noun} {{}}", object_is=f"is the {noun} of {{}}")


def read_phrases(file: Path | None, relations: Iterable[str]) -> dict[str, Phrase]:
    """Relation -> its phrase; that of its name for relations that the file does not have.

    Args:
        file: JSONL of `{"relation": ..., "noun": ..., "subject_is": ...}`, with `object_is`, `subject` and `object` or
            without.

    Raises:
        ValueError: a line is no phrase, or says how a relation is said that the graph does not have; names the lines.
    """
    phrases = {relation: plain_phrase(relation) for relation in relations}
    if file is not None:
        phrases.update(read_jsonl(file, partial(_phrase, set(phrases))))
    return phrases


def _phrase(relations: set[str], line: dict[str, Any], number: int) -> tuple[str, Phrase]:
    relation = line.pop("relation", None)
    if relation not in relations:
        meant = suggestion(str(relation), relations)
        raise ValueError(f"relation {relation!r} is not in the graph, or was on a line before.{meant}")
    relations.remove(relation)
    known = {field.name for field in fields(Phrase)}
    if unknown := line.keys() - known:
        raise ValueError(f"has the unknown key {min(unknown)!r}; keys are relation, {', '.join(sorted(known))}")
    if wrong := [key for key, value in line.items() if not isinstance(value, str) or not value]:
        raise ValueError(f'"{wrong[0]}" is not a text')
    if missing := {"noun", "subject_is"} - line.keys():
        raise ValueError(f'"{min(missing)}" is missing')
    line.setdefault("object_is", f"is the {line['noun']}")
    for key in ("noun", "subject_is", "object_is"):
        if line[key].count("{}") != 1:
            raise ValueError(f'"{key}" is {line[key]!r}; it has {{}} once, where the entity stands')
        if article := _ARTICLE.search(line[key]):
            raise ValueError(
                f'"{key}" is {line[key]!r}: {article[1]!r} would stand before "the river of Paris" and "either Rome or '
                'Oslo" too. Put an article that belongs to a name into the names of the graph'
            )
    return relation, Phrase(**line)
