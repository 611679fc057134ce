"""A program that compares answers symbolically, one after the other, each within a CPU time limit.

`comparers.py` starts it as `python -P comparison.py SECONDS BYTES`. It imports nothing of slimrl.

1. It imports math-verify and compares one pair to warm up; it prints `true` when it is ready.
2. It reads answer and label from stdin, a JSON list per line, and prints `true` or `false`, or in a JSON text the
   exception that the comparison raised.
3. If a comparison takes more than SECONDS of CPU time, the kernel ends the process with SIGXCPU. An exception would not
   do, since math-verify and sympy catch exceptions of all kinds.
4. It may add BYTES of address space to what it has when it is ready. A comparison that needs more ends in a
   MemoryError, which sympy or math-verify may take for a form that they do not know: the answers are not equal then.
5. It ends at the end of stdin, and so with the process that started it.
"""

import json
import logging
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr

MAX_RELATIVE_DIFFERENCE = 1e-6
"""The largest difference of two numbers that are equal. math-verify rounds to 6 places, with which all numbers below
1e-7 would be equal."""

_NORMALIZATION = replace(LatexExtractionConfig().normalization_config, units=False)
"""math-verify's own, but for units: it would drop letters such as m and t from the end, of `3m` and of `2ab`."""

_DROPPED = ("'", '"', "...", r"\ldots")
"""Marks that math-verify removes from an answer, though they change what it says."""

_COMMAND = re.compile(r"\\[A-Za-z]+")
_CAPITAL = re.compile(r"\\mathbb ?\{[A-Z]\}|\\[A-Za-z]+|[A-Z]")
"""A capital, or a LaTeX command, which is one thing even where it contains capitals"""
_GREEK = [
    rf"\{name} "
    for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
                 "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega")
]  # fmt: skip


def equivalent(answer: str, label: str) -> bool:
    """Whether two answers, in LaTeX as within \\boxed{}, are mathematically equal. May take arbitrarily long."""
    if any(answer.count(mark) != label.count(mark) for mark in _DROPPED):
        return False
    answer, label = _with_cases(answer, label)
    gold, given = _parsed(label), _parsed(answer)
    # math-verify's own limit is of wall-clock time.
    same = verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(same) and _same_size(gold, given)


def _with_cases(answer: str, label: str) -> list[str]:
    """Both texts, with each capital replaced by an unused Greek letter if its small letter occurs too, since
    math-verify takes R for r."""
    letters = set(_COMMAND.sub("", answer + label))
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    spare = [letter for letter in _GREEK if letter.strip() not in answer + label]
    names = dict(zip(capitals, spare, strict=False))
    return [_CAPITAL.sub(lambda found: names.get(found[0], found[0]), text) for text in (answer, label)]


def _parsed(answer: str) -> list[Any]:
    """What math-verify makes of the whole answer; by default it takes the last number of one that it cannot read."""
    whole = [LatexExtractionConfig(normalization_config=_NORMALIZATION)]
    return parse(f"\\boxed{{{answer}}}", whole, fallback_mode="no_fallback", parsing_timeout=None)


def _same_size(gold: list[Any], given: list[Any]) -> bool:
    """Whether two numbers are near each other in relation to their size; true if they are no numbers."""
    first, second = gold[0], given[0]
    if not (isinstance(first, Expr) and isinstance(second, Expr) and first.is_number and second.is_number):
        return True
    difference = abs(second - first)
    # False also where terms cancel so far that no digit of the difference is known, and for infinities.
    if not difference.is_comparable:
        return True
    return bool(difference.evalf() <= MAX_RELATIVE_DIFFERENCE * abs(first).evalf())


@contextmanager
def cpu_limit(seconds: int) -> Iterator[None]:
    """Have the kernel end this process if the block takes more than `seconds` of CPU time, rounded up."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def limit_memory(added_bytes: int) -> None:
    """Have the kernel refuse this process more than `added_bytes` of address space on top of what it has."""
    with open("/proc/self/statm") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + added_bytes, size_bytes + added_bytes))


def main() -> None:
    # Libraries must not print among the answers, nor log to the driver's terminal.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger().addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds, memory_bytes = map(int, sys.argv[1:])
    print(json.dumps(equivalent("2\\sqrt{2}", "\\sqrt{8}")), file=answers, flush=True)
    limit_memory(memory_bytes)
    for line in sys.stdin:
        answer, label = json.loads(line)
        same: bool | str
        try:
            with cpu_limit(seconds):
                same = equivalent(answer, label)
        except MemoryError:
            same = False
        except Exception as error:  # noqa: BLE001 - who asked says it; the next pair is another one
            same = f"{type(error).__name__}: {error}"
        print(json.dumps(same), file=answers, flush=True)


if __name__ == "__main__":
    main()
