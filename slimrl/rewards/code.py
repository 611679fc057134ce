"""Reward for a program of the policy that passes the tests of its prompt, run in the sandbox (docs/sandbox.md).

The tests are the prompt's label, or a key of its metadata:

- `{"inputs": [...], "outputs": [...]}`: texts on stdin and the texts expected on stdout, as in APPS (arXiv:2105.09938).
  A run for each; outputs are compared here, line by line without white space at the ends of lines and of the text.
- a text or a list of texts, each a test in Python: statements with `assert` as in MBPP (arXiv:2108.07732), functions
  `test...`, or classes of `unittest`. All in one run, in a process apart from the program's (code_harness.py).

Expected outputs and tests never lie where the program could read or change them, and its process has no part in the
verdict. A test that was not reached, because the program ended or ran out of a limit, is not passed.
"""

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from slimrl.agent.sandbox.interface import MAX_CODE_BYTES, Ended, Program, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.data.trajectory import Prompt, Trajectory
from slimrl.rewards.texts import AnswerPlace

HARNESS = Path(__file__).with_name("code_harness.py")
LENGTH_BYTES = 10
"""Digits in front of the program on the harness's stdin."""


class Credit(str, Enum):
    all = "all"
    """1.0 if all tests are passed, else 0.0."""
    fraction = "fraction"
    """The fraction of tests passed. A program that always prints the same may pass a good part."""


class CodeTests:
    """Tests of the program in the policy's last text.

    Args:
        answer_in: where the program stands, see AnswerPlace.
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
        self._pool = sandbox
        self._harness = HARNESS.read_text()

    async def start(self) -> None:
        """Raises SandboxError if the sandbox does not run a program."""
        passed = await self._pass_texts("def two(): return 2", ["assert two() == 2", "assert two() == 3"])
        if passed != [True, False]:
            raise SandboxError("the sandbox does not run a test as it should")

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """
        Raises:
            ValueError: the prompt has no tests.
            SandboxError: the sandbox failed or is too busy; nothing is known of the program.
        """
        tests = prompt.metadata.get(self._key) if self._key else prompt.label
        cases, texts = _cases(tests), _texts(tests)
        if not cases and not texts:
            where = f"metadata.{self._key}" if self._key else "the label"
            raise ValueError(f"{where} of {prompt.prompt_id} has no tests: {str(tests)[:80]}")
        code = self._place.of(trajectory)
        if code is None or "\0" in code or len(code.encode("utf-8", "replace")) > MAX_CODE_BYTES:
            return 0.0
        number = len(cases or texts)
        passed = sum(await (self._pass_cases(code, cases) if cases else self._pass_texts(code, texts)))
        return float(passed == number) if self._credit is Credit.all else passed / number

    async def _pass_cases(self, code: str, cases: Sequence[tuple[str, str]]) -> list[bool]:
        """Which were passed, up to the one that decides all or after which there is no time."""
        passed: list[bool] = []
        seconds = 0.0
        for given, expected in cases:
            result = await self._pool.run(Program(code=code, stdin=given.encode("utf-8", "replace")))
            passed.append(result.ended is Ended.ok and _lines(result.stdout) == _lines(expected))
            seconds += result.seconds
            decided = self._credit is Credit.all and not passed[-1]
            if decided or result.ended is Ended.timeout or seconds > self._total_s:
                break
        return passed

    async def _pass_texts(self, code: str, texts: Sequence[str]) -> list[bool]:
        """Which were passed, up to the end of the run."""
        program = code.encode("utf-8", "replace")
        stdin = b"%0*d" % (LENGTH_BYTES, len(program)) + program + json.dumps(texts).encode()
        result = await self._pool.run(Program(code=self._harness, stdin=stdin))
        return [line == "pass" for line in result.stdout.split("\n")[:-1]]


def _cases(tests: Any) -> list[tuple[str, str]]:
    """Inputs with their outputs; none if the tests are not of this kind, such as APPS's calls of a function."""
    match tests:
        case {"fn_name": str()}:
            return []
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            return [(_joined(given), _joined(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    return []


def _texts(tests: Any) -> list[str]:
    """Tests in Python; none if the tests are not of this kind."""
    texts = tests if isinstance(tests, list) else [tests]
    return texts if all(isinstance(text, str) and text.strip() for text in texts) else []


def _joined(text: str | list[str]) -> str:
    """A text that some data sets give as a list of its lines."""
    return text if isinstance(text, str) else "\n".join(text)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
