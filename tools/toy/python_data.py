"""The Python task: questions that a short program answers, and conversations for the cold start.

Each kind of question has programs, of which one is right; the others are mistakes that are easily made, such as a range
that ends too early. The demonstrations run each of them with the probability of PROGRAMS, or guess. A model that
imitates them can write the right program of every kind, and mostly does not.
"""

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slimrl_tools.toy.calculator_data import guess
from slimrl_tools.toy.task_lines import asked, call

from slimrl.agent.sandbox.tools import python
from slimrl.agent.tools import make_tool
from slimrl.base.atomic import atomic_folder
from slimrl.base.jsonl import write_lines

GUESS_FRACTION = 0.25
"""Demonstrations that guess, without a program."""
NO_IMPORT = """Traceback (most recent call last):
  File "<code>", line 1, in <module>
    {code}
           ^^^^
NameError: name 'math' is not defined. Did you forget to import 'math'?"""
"""What the tool answers to `print(math.gcd(...))` alone."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of question. Texts and programs have the names of the numbers in braces."""

    texts: tuple[str, ...]
    numbers: Callable[[random.Random], dict[str, int]]
    programs: dict[str, float]
    """Probability of each in the demonstrations that do not guess; the first one is right."""


def _between(**ranges: tuple[int, int]) -> Callable[[random.Random], dict[str, int]]:
    return lambda rng: {name: rng.randint(*bounds) for name, bounds in ranges.items()}


KINDS = {
    "squares": Kind(
        texts=("What is the sum of the squares of {a} to {b}?", "Add the squares of all numbers from {a} to {b}."),
        numbers=_between(a=(11, 99), b=(100, 299)),
        programs={"print(sum(i*i for i in range({a}, {b}+1)))": 0.4, "print(sum(i*i for i in range({a}, {b})))": 0.6},
    ),
    "multiples": Kind(
        texts=("How many numbers from 1 to {b} are divisible by {a} or by 7?",
               "Count the numbers from 1 to {b} that {a} or 7 divides."),
        numbers=_between(a=(11, 39), b=(400, 999)),
        programs={
            "print(sum(i%{a}==0 or i%7==0 for i in range(1, {b}+1)))": 0.35,
            "print(sum(i%{a}==0 for i in range(1, {b}+1)))": 0.3,
            "print({b}//{a}+{b}//7)": 0.35,
        },
    ),
    "remainder": Kind(
        texts=("What is the remainder of {a} to the power {b} divided by {m}?",
               "Divide {a} to the power {b} by {m}. What is the remainder?"),
        numbers=_between(a=(11, 99), b=(11, 99), m=(1001, 9999)),
        programs={"print(pow({a}, {b}, {m}))": 0.4, "print({a}*{b}%{m})": 0.6},
    ),
    "digits": Kind(
        texts=("What is the sum of the digits of {a} times {b}?", "Multiply {a} by {b} and add the digits."),
        numbers=_between(a=(1001, 9999), b=(1001, 9999)),
        programs={"print(sum(map(int, str({a}*{b}))))": 0.4, "print({a}*{b})": 0.6},
    ),
    "sequence": Kind(
        texts=("A sequence begins with {a} and {b}; each further term adds the two before it. What is term {n}?",
               "What is term {n} of the sequence {a}, {b}, ... if each term adds the two before it?"),
        numbers=_between(a=(11, 99), b=(11, 99), n=(8, 19)),
        programs={
            "x, y = {a}, {b}\nfor _ in range({n}-1):\n    x, y = y, x+y\nprint(x)": 0.4,
            "x, y = {a}, {b}\nfor _ in range({n}):\n    x, y = y, x+y\nprint(x)": 0.6,
        },
    ),
    "divisor": Kind(
        texts=("What is the greatest common divisor of {a} and {b}?",
               "Which is the largest number that divides {a} and {b}?"),
        numbers=lambda rng: _with_divisor(rng),
        programs={
            "import math\nprint(math.gcd({a}, {b}))": 0.35,
            "print(math.gcd({a}, {b}))": 0.3,
            "print({a}%{b})": 0.35,
        },
    ),
}  # fmt: skip


def _with_divisor(rng: random.Random) -> dict[str, int]:
    divisor = rng.randint(11, 99)
    return {"a": divisor * rng.randint(11, 60), "b": divisor * rng.randint(11, 60)}


@dataclass(frozen=True, kw_only=True)
class Question:
    kind: str
    text: str
    numbers: tuple[tuple[str, int], ...]

    def program(self, template: str) -> str:
        return template.format(**dict(self.numbers))

    @property
    def value(self) -> int:
        return int(printed(self.program(next(iter(KINDS[self.kind].programs)))))


def write_python_data(out: Path, *, seed: int, num_train: int, num_heldout: int, num_conversations: int) -> None:
    """Write `train.jsonl`, `heldout.jsonl` (prompts) and `sft.jsonl` (conversations) into a new folder.

    The same seed gives the same files. No numbers of a question of `heldout.jsonl` are in one of the other two with the
    same kind.

    Raises:
        ValueError: `out` exists.
    """
    with atomic_folder(out) as partial:
        rng = random.Random(seed)
        seen: set[tuple[Any, ...]] = set()
        heldout = [_new_question(rng, seen) for _ in range(num_heldout)]
        train = [_new_question(rng, seen) for _ in range(num_train)]
        conversations = (_conversation(_new_question(rng, seen), rng) for _ in range(num_conversations))
        write_lines(partial / "heldout.jsonl", map(_prompt_line, heldout))
        write_lines(partial / "train.jsonl", map(_prompt_line, train))
        write_lines(partial / "sft.jsonl", conversations)


def printed(code: str) -> str:
    """What one of the programs of KINDS prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue().rstrip("\n")


def _new_question(rng: random.Random, seen: set[tuple[Any, ...]]) -> Question:
    """One that is not in `seen`, to which it is added."""
    while True:
        kind = rng.choice(tuple(KINDS))
        numbers = KINDS[kind].numbers(rng)
        question = Question(
            kind=kind, text=rng.choice(KINDS[kind].texts).format(**numbers), numbers=tuple(numbers.items())
        )
        if (kind, question.numbers) not in seen:
            seen.add((kind, question.numbers))
            return question


def _prompt_line(question: Question) -> dict[str, Any]:
    return {"prompt": question.text, "label": question.value, "metadata": {"kind": question.kind}}


def _conversation(question: Question, rng: random.Random) -> dict[str, Any]:
    programs = KINDS[question.kind].programs
    template = rng.choices(list(programs), list(programs.values()))[0]
    turns = _guess(question) if rng.random() < GUESS_FRACTION else _run(question, template)
    return {"messages": asked(question.text) + list(turns), "tools": [_schema()]}


def _guess(question: Question) -> Iterator[dict[str, Any]]:
    yield _answer(str(guess(question.value)))


def _run(question: Question, template: str) -> Iterator[dict[str, Any]]:
    """The program, and the answer that it prints; a missing import is noticed half of the time."""
    code = question.program(template)
    yield call("python", code=code)
    if template.startswith("print(math"):
        yield {"role": "tool", "content": NO_IMPORT.format(code=code)}
        code = f"import math\n{code}"
        yield call("python", code=code)
    yield {"role": "tool", "content": printed(code)}
    yield _answer(printed(code))


@cache
def _schema() -> dict[str, Any]:
    return make_tool(python).schema


def _answer(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is \\boxed{{{value}}}."}
