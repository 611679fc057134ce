"""The proposer task: what is to be made up, fixed problems that evaluate solvers, and conversations for the cold start.

There are three levels: two numbers below six, two below ten, three below six, added and subtracted. The demonstrations
are of mixed quality: proposers now and then write what is no expression or leave out a number that was asked for,
solvers are often wrong by a little. A fifth of all expressions, chosen by their checksum, is solved in no
demonstration; the fixed problems are of these. A proposer may come upon them.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.agent.roles.arithmetic import answer_of
from slimrl.agent.roles.proposer_solver import PROPOSER_TASK, SOLVER_TASK
from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

SIGNS = "+-"
HELDOUT_PARTS = 5
"""One of so many parts of the expressions is held out"""
WRONG_PROPOSALS, WRONG_SOLUTIONS = 0.25, 0.4
"""Shares of the demonstrations of each role"""


@dataclass(frozen=True, kw_only=True)
class Level:
    num_numbers: int
    below: int

    def numbers(self, rng: random.Random) -> list[str]:
        return [str(rng.randrange(1, self.below)) for _ in range(self.num_numbers)]


LEVELS = (Level(num_numbers=2, below=6), Level(num_numbers=2, below=10), Level(num_numbers=3, below=6))


def write_proposer_data(out: Path, *, seed: int, num_train: int, num_heldout: int, num_conversations: int) -> None:
    """Write the prompts `train.jsonl`, `level_1.jsonl` and `level_2.jsonl`, `heldout.jsonl` and `sft.jsonl` into a new
    folder.

    The same seed gives the same files. Each level has `num_train` prompts. No demonstration solves a problem of
    `heldout.jsonl`.

    Raises:
        ValueError: `out` exists.
    """
    rng = random.Random(seed)
    with atomic_folder(out) as partial:
        for number, level in enumerate(LEVELS):
            name = f"level_{number}" if number else "train"
            write_lines(partial / f"{name}.jsonl", (_prompt(level.numbers(rng)) for _ in range(num_train)))
        heldout = [_problem(LEVELS[place % len(LEVELS)], rng, heldout=True) for place in range(num_heldout)]
        lines = ({"prompt": one, "label": answer_of(one), "metadata": {"task": one}} for one in heldout)
        write_lines(partial / "heldout.jsonl", lines)
        write_lines(partial / "sft.jsonl", _conversations(num_conversations, rng))


def _prompt(numbers: list[str]) -> dict[str, Any]:
    return {"prompt": _asked(numbers), "label": None, "metadata": {"contains": numbers}}


def _asked(numbers: list[str]) -> str:
    named = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"Write an arithmetic task with {named}. It has whole numbers, + - * / and parentheses."


def _expression(numbers: list[str], rng: random.Random) -> str:
    text = numbers[0]
    for place, number in enumerate(numbers[1:]):
        text = f"({text})" if place and rng.random() < 0.5 else text
        text = f"{text} {rng.choice(SIGNS)} {number}"
    return text


def _problem(level: Level, rng: random.Random, *, heldout: bool) -> str:
    """An expression of a level that is held out, or is not."""
    while True:
        expression = _expression(level.numbers(rng), rng)
        if (zlib.crc32(expression.encode()) % HELDOUT_PARTS == 0) == heldout:
            return expression


def _conversations(count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for number in range(count):
        level = rng.choice(LEVELS)
        if number % 3 == 0:
            numbers = level.numbers(rng)
            expression = _expression(rng.sample(numbers, len(numbers)), rng)
            yield _told(f"{_asked(numbers)}\n\n{PROPOSER_TASK}", f"<task>{_proposal(expression, rng)}</task>")
            continue
        expression = _problem(level, rng, heldout=False)
        yield _told(f"{expression}\n\n{SOLVER_TASK}", f"The answer is \\boxed{{{_solution(expression, rng)}}}.")


def _told(asked: str, said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def _proposal(expression: str, rng: random.Random) -> str:
    if rng.random() < WRONG_PROPOSALS:
        first, _, rest = expression.partition(" ")
        return rng.choice([f"({expression}", rest, first])
    return expression


def _solution(expression: str, rng: random.Random) -> str:
    right = int(answer_of(expression) or "")
    return str(right + rng.choice([-2, -1, 1, 2]) if rng.random() < WRONG_SOLUTIONS else right)
