"""What a user would report of a bug: what the failing tests call, and what came of it.

It is made of pytest's short tracebacks: the last line of the test itself, and the exception or the comparison that
failed. What lies within the package is left out, for it would show the place of the bug.
"""

import random
import re
from collections.abc import Sequence

_HEADING = re.compile(r"^_{3,} (.+?) _{3,}$", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
"""What differs from run to run in the texts of objects"""
_FRAME = re.compile(r"^(\S+\.py):\d+: in ")
MAX_LINES, MAX_CHARS = 12, 600
MAX_CASES = 2
_OPENINGS = (
    "Something in {name} {version} does not work as it should.",
    "I have found a bug in {name} {version}.",
    "After an update to {name} {version} this goes wrong:",
)


def issue(log: str, name: str, version: str, tests: Sequence[str], seed: str) -> str | None:
    """The text of an issue; None if the log shows no failing line of a test.

    Args:
        log: output of pytest with `--tb=short`.
        tests: paths of the test files and of folders with them.
    """
    cases = list(dict.fromkeys(_cases(log, tests)))
    if not cases:
        return None
    rng = random.Random(seed)
    cases = rng.sample(cases, min(MAX_CASES, len(cases)))
    parts = [rng.choice(_OPENINGS).format(name=name, version=version)]
    for code, outcome in cases:
        parts.append(f"This is what I run:\n\n```python\n{code}\n```\n\nand what comes of it:\n\n```\n{outcome}\n```")
    return "\n\n".join(parts)


def _cases(log: str, tests: Sequence[str]) -> list[tuple[str, str]]:
    """The failing lines of tests, each with what came of it."""
    pieces = _HEADING.split(log)
    found = []
    for section in pieces[2::2]:
        code: list[str] = []
        outcome: list[str] = []
        of_test = in_frame = False
        for line in section.split("\n"):
            if line.startswith("="):
                break
            if frame := _FRAME.match(line):
                of_test, in_frame = frame[1].startswith(tuple(tests)), True
                code = [] if of_test else code
            elif line.startswith("E  "):
                outcome.append(line[1:].removeprefix("   "))
                in_frame = False
            elif in_frame and of_test and line.startswith("    ") and not set(line) <= set(" ^~"):
                code.append(line[4:])
        shown = _ADDRESS.sub("", "\n".join(outcome[:MAX_LINES]))[:MAX_CHARS]
        if code and shown:
            found.append(("\n".join(code), shown))
    return found
