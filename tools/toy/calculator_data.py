"""The calculator task: problems for training and evaluation, and conversations for the cold start.

The demonstrations are of mixed quality. Told to compute, they nearly always use the calculator; asked a question, they
mostly guess, and wrongly. Some drop the last operation, some write a malformed call and correct it. A model that
imitates them has every skill that the task needs, and solves about half of it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl_tools.toy.task_lines import asked, call

from slimrl.agent.calculator import calculator
from slimrl.agent.environment import error_text
from slimrl.agent.sglang_parser import UNREADABLE
from slimrl.agent.tools import make_tool
from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

PHRASES = {
    "order": ("Compute {}.", "Calculate {}.", "Evaluate {}."),
    "question": ("What is {}?", "Find {}.", "Tell me {}."),
}
"""Phrasings of a problem by kind; the demonstrations behave differently on the two."""

BEHAVIOURS = {
    "order": {"careful": 0.85, "guess": 0.05, "hasty": 0.06, "malformed": 0.04},
    "question": {"careful": 0.22, "guess": 0.68, "hasty": 0.06, "malformed": 0.04},
}
"""Probabilities of the demonstrations' behaviours, by kind."""

SMALLEST_VALUE, LARGEST_VALUE = 1_000, 9_999_999

NO_TOOLS_FRACTION = 0.04
"""Fraction of the demonstrations without tools, which guess."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An expression, and the sentence that asks for its value."""

    expression: str
    kind: str
    text: str
    value: int


def write_calculator_data(out: Path, *, seed: int, num_train: int, num_heldout: int, num_conversations: int) -> None:
    """Write `train.jsonl`, `heldout.jsonl` (prompts) and `sft.jsonl` (conversations) into a new folder.

    The same seed gives the same files. No expression of `heldout.jsonl` is in one of the other two.

    Raises:
        ValueError: `out` exists.
    """
    with atomic_folder(out) as partial:
        rng = random.Random(seed)
        seen: set[str] = set()
        heldout = [_new_problem(rng, seen) for _ in range(num_heldout)]
        train = [_new_problem(rng, seen) for _ in range(num_train)]
        tools = [make_tool(calculator).schema]
        conversations = (_conversation(_new_problem(rng, seen), tools, rng) for _ in range(num_conversations))
        write_lines(partial / "heldout.jsonl", map(_prompt_line, heldout))
        write_lines(partial / "train.jsonl", map(_prompt_line, train))
        write_lines(partial / "sft.jsonl", conversations)


def _new_problem(rng: random.Random, seen: set[str]) -> Problem:
    """One that is not in `seen`, to which it is added.

    Its value has four to seven digits: too many to compute without the tool, few enough to copy.
    """
    while True:
        problem = _any_problem(rng)
        if SMALLEST_VALUE <= abs(problem.value) <= LARGEST_VALUE and problem.expression not in seen:
            seen.add(problem.expression)
            return problem


def _any_problem(rng: random.Random) -> Problem:
    """Two or three operations on numbers of two or three digits, at least one of them a product."""
    num_operations = rng.choice((2, 2, 2, 3))
    numbers = [rng.randint(12, 99) if rng.random() < 0.5 else rng.randint(100, 999) for _ in range(num_operations + 1)]
    symbols = [rng.choice("+-*") for _ in range(num_operations)]
    symbols[rng.randrange(num_operations)] = "*"
    terms = [str(number) for number in numbers]
    if rng.random() < 0.3:
        first = rng.randrange(num_operations)
        terms[first], terms[first + 1] = f"({terms[first]}", f"{terms[first + 1]})"
    expression = terms[0] + "".join(symbol + term for symbol, term in zip(symbols, terms[1:], strict=True))
    kind = rng.choice(tuple(PHRASES))
    text = rng.choice(PHRASES[kind]).format(expression)
    return Problem(expression=expression, kind=kind, text=text, value=int(calculator(expression)))


def guess(value: int) -> int:
    """The value rounded to two digits; never the right one."""
    unit = 10 ** max(0, len(str(abs(value))) - 2)
    rounded = round(value / unit) * unit
    return rounded if rounded != value else rounded + unit


def _prompt_line(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": problem.text,
        "label": problem.value,
        "metadata": {"expression": problem.expression, "kind": problem.kind},
    }


def _conversation(problem: Problem, tools: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    if rng.random() < NO_TOOLS_FRACTION:
        return {"messages": asked(problem.text) + _guess(problem)}
    weights = BEHAVIOURS[problem.kind]
    behaviour = rng.choices(list(weights), list(weights.values()))[0]
    return {"messages": asked(problem.text) + _DEMONSTRATIONS[behaviour](problem), "tools": tools}


def _careful(problem: Problem) -> list[dict[str, Any]]:
    return [*_call(problem.expression), _answer(problem.expression, problem.value)]


def _guess(problem: Problem) -> list[dict[str, Any]]:
    return [_answer(problem.expression, guess(problem.value))]


def _hasty(problem: Problem) -> list[dict[str, Any]]:
    flat = problem.expression.replace("(", "").replace(")", "")
    shorter = flat[: max(flat.rfind(symbol) for symbol in "+-*")]
    return [*_call(shorter), _answer(shorter, int(calculator(shorter)))]


def _malformed(problem: Problem) -> list[dict[str, Any]]:
    text = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{problem.expression}"}}\n</tool_call>'
    reply = {"role": "tool", "content": error_text(UNREADABLE)}
    return [{"role": "assistant", "content": text}, reply, *_careful(problem)]


_DEMONSTRATIONS: dict[str, Callable[[Problem], list[dict[str, Any]]]] = {
    "careful": _careful,
    "guess": _guess,
    "hasty": _hasty,
    "malformed": _malformed,
}


def _call(expression: str) -> Iterator[dict[str, Any]]:
    yield call("calculator", expression=expression)
    yield {"role": "tool", "content": calculator(expression)}


def _answer(expression: str, value: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"{expression} = \\boxed{{{value}}}."}
