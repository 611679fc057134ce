"""The first answers of two evaluations side by side, to read what figures do not say."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from slimrl.evaluation.comparison import read_complete
from slimrl.evaluation.estimates import items_by_prompt
from slimrl.evaluation.folder import EvalFolder
from slimrl.evaluation.item import Item


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """The first sample of a prompt in each evaluation."""

    set: str
    question: str
    a: Item
    b: Item


def answer_rows(folder_a: EvalFolder, folder_b: EvalFolder, count: int) -> list[AnswerRow]:
    """The first `count` prompts of each set that both evaluations have, in the order of A.

    Args:
        folder_a: complete, as `folder_b`, and of the same prompts; `compare` refuses others.
    """
    a, b = read_complete(folder_a), read_complete(folder_b)
    return [row for name in a if name in b for row in islice(_rows(a[name], b[name]), count)]


def answer_of(item: Item) -> str:
    """What the assistant said last; empty if a trajectory ended before it said anything."""
    return next((_text(said) for said in reversed(item.messages) if said["role"] == "assistant"), "")


def _rows(a: list[Item], b: list[Item]) -> Iterator[AnswerRow]:
    others = items_by_prompt(b)
    for prompt_id, items in items_by_prompt(a).items():
        first = items[0]
        yield AnswerRow(set=first.set, question=_question(first), a=first, b=others[prompt_id][0])


def _question(item: Item) -> str:
    """The first message of a user; empty without one."""
    return next((_text(said) for said in item.messages if said["role"] == "user"), "")


def _text(message: dict[str, object]) -> str:
    return str(message.get("content") or "")
