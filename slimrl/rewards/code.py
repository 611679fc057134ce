"""Reward for a program of the policy that passes the tests of its prompt, run in the sandbox (docs/gateway.md#sandbox).

The tests are the prompt's label, or a key of its metadata, in the forms of code_tests.py:

- texts on stdin: a run for each; outputs are compared here, by `same_output`.
- calls of a function, and tests in Python: all in one run, in a process apart from the program's (code_harness.py).

Expected outputs and tests never lie where the program could read or change them, and its process has no part in the
verdict. A test that was not reached, because the program ended or ran out of a limit, is not passed.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from slimrl.agent.sandbox.interface import MAX_CODE_BYTES, Ended, Program, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.threads import in_thread
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards import code_values
from slimrl.rewards.code_tests import PRELUDE, Calls, Cases, Tests, Texts, read_tests
from slimrl.rewards.texts import AnswerPlace, fenced_blocks, last_text

HARNESS = Path(__file__).with_name("code_harness.py")
VALUES = Path(code_values.__file__)
CHECKS = Path(__file__).with_name("code_checks.py")
KEPT_TESTS = 64
"""Prompts whose tests are kept as they were read."""
LENGTH_BYTES = 10
"""Digits in front of the program on the harness's stdin."""
RELATIVE, ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")
"""Relative and absolute tolerance of a printed number where the expected one has a fraction, as in APPS and TACO."""
_READS = re.compile(r"\b(input|open)\s*\(|\b(stdin|fileinput)\b")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


class Credit(str, Enum):
    all = "all"
    """The reward is 1.0 if all tests are passed, else 0.0."""
    fraction = "fraction"
    """The reward is the fraction of tests passed. A program that always prints the same may pass a good part."""


class CodeTests:
    """Tests of the program in the policy's last text.

    Args:
        answer_in: where the program stands, see AnswerPlace; of several fenced blocks, see `program_block`.
        credit: `all` or `fraction`.
        tests_key: key of the prompt's metadata that holds the tests; empty for the label.
        total_s: run time of all tests together, after which no further one is passed.
        sandbox: the run's, `agent.sandbox`.

    Raises:
        ValueError: a wrong setting.
    """

    def __init__(
        self,
        *,
        sandbox: SandboxPool,
        answer_in: str = "code",
        credit: str = "all",
        tests_key: str = "",
        total_s: float = 60.0,
    ) -> None:
        if credit not in list(Credit):
            raise ValueError(f"credit: {credit!r} is neither all nor fraction")
        if not total_s > 0:
            raise ValueError(f"total_s: {total_s:g} is not positive")
        self._place, self._credit, self._key, self._total_s = AnswerPlace(answer_in), Credit(credit), tests_key, total_s
        self._in_block = answer_in == "code"
        self._latest: deque[tuple[Prompt, asyncio.Future[Tests]]] = deque(maxlen=KEPT_TESTS)
        self._pool = sandbox
        self._harness, self._checks = _harness(), CHECKS.read_text()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises ValueError if the prompt has no tests, or such as could not be run or would check nothing."""
        tests = read_tests(prompt, self._key)
        missing = sorted(filter(self._pool.lacks, tests.names.packages)) if isinstance(tests, Texts) else []
        if missing:
            raise ValueError(f"tests need {', '.join(missing)}, which agent.sandbox.packages does not give programs")

    async def start(self) -> None:
        """Raises SandboxError if the sandbox does not run a program."""
        two = read_tests(Prompt(prompt_id="", messages=[{}], label=["assert two() == 2", "assert two() == 3"]))
        assert isinstance(two, Texts)
        if await self._pass_texts("def two(): return 2", two) != [True, False]:
            raise SandboxError("the sandbox does not run a test as it should")

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """
        Raises:
            ValueError: the prompt has no tests, see `check_prompt`.
            SandboxError: the sandbox failed or is too busy; nothing is known of the program.
        """
        tests = await self._tests_of(prompt)
        code = self._program(trajectory, tests)
        if code is None or "\0" in code or len(code.encode("utf-8", "replace")) > MAX_CODE_BYTES:
            return 0.0
        match tests:
            case Cases(pairs):
                number, passed = len(pairs), await self._pass_cases(code, pairs)
            case Calls(_, pairs):
                number, passed = len(pairs), await self._pass_calls(code, tests)
            case Texts(texts):
                number, passed = len(texts), await self._pass_texts(code, tests)
        return float(sum(passed) == number) if self._credit is Credit.all else sum(passed) / number

    async def _tests_of(self, prompt: Prompt) -> Tests:
        """The tests of a prompt, whose trajectories end at about the same time, read once."""
        for known, tests in self._latest:
            if known is prompt:
                return await asyncio.shield(tests)  # one trajectory's cancellation leaves it to the others
        reading = asyncio.ensure_future(in_thread(partial(read_tests, prompt, self._key)))
        self._latest.append((prompt, reading))
        return await asyncio.shield(reading)

    def _program(self, trajectory: Trajectory, tests: Tests) -> str | None:
        return program_block(last_text(trajectory) or "", tests) if self._in_block else self._place.of(trajectory)

    async def _pass_cases(self, code: str, cases: Sequence[tuple[str, str]]) -> list[bool]:
        """Which test cases were passed, up to the one that decides all or after which there is no time."""
        passed: list[bool] = []
        seconds = 0.0
        for given, expected in cases:
            result = await self._pool.run(Program(code=code, stdin=given.encode("utf-8", "replace")))
            passed.append(result.ended is Ended.ok and same_output(result.stdout, expected))
            seconds += result.seconds
            decided = self._credit is Credit.all and not passed[-1]
            if decided or result.ended is Ended.timeout or seconds > self._total_s:
                break
        return passed

    async def _pass_calls(self, code: str, calls: Calls) -> list[bool]:
        return await self._judge(code, PRELUDE, {"function": calls.function, "calls": calls.pairs})

    async def _pass_texts(self, code: str, tests: Texts) -> list[bool]:
        names = {"python": tests.names.python, "program": sorted(tests.names.program)}
        return await self._judge(code, tests.before, {"texts": tests.texts, "setup": tests.setup, **names})

    async def _judge(self, code: str, before: str, tests: dict[str, Any]) -> list[bool]:
        """Which tests were passed, up to the end of the run; an empty list if there are verdicts that no test has."""
        program = json.dumps({"code": code, "before": before}).encode()
        given = json.dumps({"checks": self._checks, "texts": [], "calls": [], **tests}).encode()
        stdin = b"%0*d" % (LENGTH_BYTES, len(program)) + program + given
        result = await self._pool.run(Program(code=self._harness, stdin=stdin))
        passed = [line == "pass" for line in result.stdout.split("\n")[:-1]]
        return passed if len(passed) <= len(tests.get("texts", tests.get("calls", ()))) else []


def _harness() -> str:
    """The harness's text, after one that makes the module whose names it imports."""
    name = code_values.__name__
    module = f"sys.modules[{name!r}] = types.ModuleType({name!r})"
    run = f"exec(compile({VALUES.read_text()!r}, '<values>', 'exec'), vars(sys.modules[{name!r}]))"
    return f"import sys, types\n{module}\n{run}\n{HARNESS.read_text()}"


def program_block(text: str, tests: Tests) -> str | None:
    """The program among the closed fenced blocks of a text, in which an example of its use or its output may follow.

    It is the last block that defines a name which the tests ask for, or that reads stdin, if there is one: of those
    marked as Python, else of those without a mark, else of all. None without a block that has any text.
    """
    blocks = [(mark.lower(), code) for mark, code in fenced_blocks(text) if code.strip()]
    fits = _READS if isinstance(tests, Cases) else _defines(tests)
    groups = [[code for mark, code in blocks if mark.startswith("py")], [code for mark, code in blocks if not mark]]
    groups.append([code for _, code in blocks])
    fitting = [code for group in groups for code in reversed(group) if fits.search(code)]
    return next(iter(fitting), next((group[-1] for group in groups if group), None))


def _defines(tests: Calls | Texts) -> re.Pattern[str]:
    names = {"Solution", tests.function} if isinstance(tests, Calls) else tests.names.program
    one = "|".join(map(re.escape, sorted(names))) or r"\w+"
    return re.compile(rf"^(?:(?:async\s+def|def|class)\s+(?:{one})\b|(?:{one})\s*(?::|=(?!=)))", re.MULTILINE)


def same_output(printed: str, expected: str) -> bool:
    """Whether a program printed what was expected: the same lines, without white space at their ends and around all, or
    lines of the same words, where numbers need only be the same numbers, and nearly so if a fraction is expected."""
    ours, theirs = printed.strip().split("\n"), expected.strip().split("\n")
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(printed: str, expected: str) -> bool:
    if printed.strip() == expected.strip():
        return True
    ours, theirs = printed.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(expected)):
        return False
    ours, theirs = Decimal(printed), Decimal(expected)
    if ours == theirs or not set(expected) & set(".eE"):
        return ours == theirs
    # The next whole number is never near, however it is written.
    size: Decimal = min(abs(theirs), Decimal(1)) if theirs == theirs.to_integral_value() else abs(theirs)
    return abs(ours - theirs) <= ABSOLUTE + RELATIVE * size
