"""How a package's tests are run, and what their log says: the lines of pytest's `-rA` summary.

A log is read as SWE-bench (arXiv:2310.06770) reads it, by version 5.0.2 of its package.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

FLAGS = "-q --tb=no --show-capture=no -rA -p no:cacheprovider -c pytest.ini"
STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
_PASSING = ("PASSED",)
"""What counts of a test that passed in the sound package. SWE-bench takes XFAIL too, and SKIPPED for tests that must
still pass; but code that calls `pytest.xfail()` or `pytest.skip()` makes either of any test."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run of the suite says of a repair."""

    repaired: float
    """Fraction of the tests of FAIL_TO_PASS that pass"""
    kept: float
    """Fraction of the tests of PASS_TO_PASS that still pass"""

    @property
    def resolved(self) -> bool:
        return self.repaired == self.kept == 1


def suite_command(tests: Sequence[str], python: str = "python3") -> str:
    """The command line, for a shell in the base folder."""
    return f"{python} -m pytest {FLAGS} {shlex.join(tests)}"


def statuses(log: str) -> dict[str, str]:
    """Test -> status. A name ends at its first space, as SWE-bench reads it."""
    found = {}
    for line in log.split("\n"):
        if not line.startswith(STATUSES):
            continue
        words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
        if len(words) < 2 or (words[0] == "SKIPPED" and words[1][1:-1].isdecimal() and words[1][0] == "["):
            continue
        found[words[1]] = words[0]
    return found


def verdict(found: dict[str, str], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> Verdict:
    repaired = [_status(test, found) in _PASSING for test in fail_to_pass]
    kept = [_status(test, found) in _PASSING for test in pass_to_pass]
    return Verdict(repaired=_fraction(repaired), kept=_fraction(kept))


def _fraction(outcomes: list[bool]) -> float:
    return sum(outcomes) / len(outcomes) if outcomes else 1.0


def _status(test: str, found: dict[str, str]) -> str | None:
    """The status of a test; of a name that was cut within its parameters that of the tests that begin with it, if they
    agree."""
    if test in found or test.count("[") <= test.count("]"):
        return found.get(test)
    alike = [status for name, status in found.items() if name.startswith(test)]
    return alike[0] if alike and len({status in _PASSING for status in alike}) == 1 else None
