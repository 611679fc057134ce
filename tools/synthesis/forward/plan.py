"""A plan: calls of tools, of which later ones take what earlier ones gave, and the words that ask for the last result.

`{#1}` stands for the result of the first call, `{#2}` for that of the second, wherever a step has a text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"\{#(\d+)\}")
HERE = "{}"
"""Where a result stands"""
ASKS = f"What is {HERE}?"


@dataclass(frozen=True, kw_only=True)
class Step:
    tool: str
    arguments: Mapping[str, Any]
    says: str
    """Its result as a noun: `the sum of 3 and {#1}`"""
    result: str = ""
    """Words of the tool's answer with `{}` for the result: `was born in {}.`; empty if all of it is the result"""
    inputs: tuple[str, ...] = ()
    """What it makes its result of: values, and references to earlier steps"""

    @property
    def references(self) -> set[int]:
        """Places of the steps whose results it takes, from 0."""
        said = (json.dumps(self.arguments), self.says, self.result, *self.inputs)
        return {int(number) - 1 for text in said for number in REFERENCE.findall(text)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """
    Raises:
        ValueError: it has no step, one takes the result of one that does not come before it, or `{}` is not once where
            a result stands.
    """

    steps: tuple[Step, ...]
    asks: str = ASKS
    """The question, where `{}` stands for the last result as a noun"""

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a plan has one step or more")
        if self.asks.count(HERE) != 1:
            raise ValueError(f"the question has not {HERE} once")
        for place, step in enumerate(self.steps):
            if step.result and step.result.count(HERE) != 1:
                raise ValueError(f"step {place + 1}: the words of its answer have not {HERE} once")
            if unknown := [number for number in step.references if not 0 <= number < place]:
                raise ValueError(f"step {place + 1} takes the result of {unknown[0] + 1}, which is no earlier step")

    @property
    def question(self) -> str:
        said: list[str] = []
        for step in self.steps:
            said.append(filled(step.says, said))
        return self.asks.replace(HERE, said[-1])

    @property
    def key(self) -> str:
        """Equal for plans that make the same calls."""
        return json.dumps([[step.tool, step.arguments, step.result] for step in self.steps], sort_keys=True)


def filled(text: str, results: Sequence[str]) -> str:
    """A text with results in the places of references."""
    return REFERENCE.sub(lambda found: results[int(found[1]) - 1], text)


def filled_arguments(value: Any, results: Sequence[str]) -> Any:
    """The same in all texts of a JSON value."""
    match value:
        case str():
            return filled(value, results)
        case list():
            return [filled_arguments(one, results) for one in value]
        case Mapping():
            return {key: filled_arguments(one, results) for key, one in value.items()}
        case _:
            return value


def texts(value: Any) -> Iterator[str]:
    """All texts of a JSON value, but for keys."""
    match value:
        case str():
            yield value
        case list() | tuple():
            for one in value:
                yield from texts(one)
        case Mapping():
            for one in value.values():
                yield from texts(one)
