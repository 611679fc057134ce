"""Software repair, after SWE-bench (arXiv:2310.06770) and SWE-smith (arXiv:2504.21798): the policy is told what a user
reports of a Python package, finds the bug in a copy of the package and repairs it; the package's tests are the verdict.

1. The copy is a sandbox session over a base folder that all tasks of the package share. The bug is put into it, and
   the test files that catch it are taken away (`tests: hidden`).
2. Each call is a program of its own in that folder, with a deadline; one that is too late ends alone.
3. `submit`, a turn without a call, and the last turn end the episode with the verdict (grading.py).

It runs in slimrl's own process, for it needs the run's sandbox.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.agent.environment import Observation, Turn, error_text
from slimrl.agent.sandbox.interface import FileChange, Language, Program, SandboxError
from slimrl.agent.sandbox.pool import PooledSession, SandboxPool
from slimrl.agent.sandbox.tools import answer
from slimrl.agent.tool_call import ToolCall
from slimrl.data.prompt import Prompt
from slimrl.environments.software_repair.answered_calls import Answered, answer_calls
from slimrl.environments.software_repair.grading import LIMITS, Grade, earned, grade, suite_limits
from slimrl.environments.software_repair.tools import EDIT, TOOLS
from slimrl.environments.software_repair.working_copy import lost, planted, task_text

SUBMIT = "Call `submit` when you are done."


class SoftwareRepair:
    """One task of repair.

    Args:
        folder: with the files that `slimrl.environments.software_repair.data` wrote.
        reward: `resolved`: 1 if all tests pass that must, else 0. `partial`: the fraction of the failing tests that
            pass now, less REGRESSION if others fail that passed.
        tests: `hidden`: the test files that catch the bug are not in the policy's copy. `shown`: all are.
        suite_s: deadline of the tests that give the verdict, in seconds of wall clock and of CPU time of a process.
    """

    def __init__(
        self,
        sandbox: SandboxPool,
        *,
        folder: str,
        reward: str = "resolved",
        tests: str = "hidden",
        suite_s: int = 120,
    ) -> None:
        self._sandbox, self._folder = sandbox, Path(folder)
        self._partial, self._hidden, self._limits = reward == "partial", tests == "hidden", suite_limits(suite_s)
        self._session: PooledSession | None = None

    @classmethod
    def check(cls, *, folder: str, reward: str = "resolved", tests: str = "hidden", suite_s: int = 120) -> None:
        """Raises ValueError for arguments that make no environment."""
        if not Path(folder, "bases").is_dir():
            raise ValueError(f"folder: {folder} has no folder `bases`: make the tasks first")
        for name, given, known in (
            ("reward", reward, ("resolved", "partial")),
            ("tests", tests, ("hidden", "shown")),
        ):
            if given not in known:
                raise ValueError(f"{name}: {given!r} is neither {' nor '.join(known)}")
        if suite_s <= 0:
            raise ValueError(f"suite_s: {suite_s} is not above 0")

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._metadata: Mapping[str, Any] = prompt.metadata
        self._base = self._folder / prompt.metadata["base"]
        self._session = await self._sandbox.session(Language.shell, folder=self._base, limits=LIMITS)
        files = planted(self._base, prompt.metadata, hidden=self._hidden)
        await self._session.put({path: content for path, content in files.items() if content is not None})
        if gone := [path for path, content in files.items() if content is None]:
            await self._session.run(f"rm -f -- {shlex.join(gone)}")
        told = f"{task_text(str(prompt.messages[-1]['content']), hidden=self._hidden)} {SUBMIT}"
        asked = [*prompt.messages[:-1], {"role": "user", "content": told}]
        return Observation(messages=asked, tools=TOOLS, state_id=await self._state())

    async def step(self, turn: Turn) -> Observation:
        answered = await answer_calls(turn, self._do)
        if answered.submitted or turn.is_last or turn.finish_reason == "end":
            return await self._end(answered)
        return Observation(messages=answered.messages, tool_errors=answered.errors, state_id=await self._state())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _do(self, call: ToolCall) -> str:
        """What a call of `bash` or `edit` answers."""
        assert self._session is not None
        try:
            if call.name == "edit":
                program = Program(code=EDIT, stdin=json.dumps(call.arguments).encode())
            else:
                program = Program(code=call.arguments["command"], language=Language.shell)
        except ValueError as error:
            return error_text(str(error))
        return answer(await self._session.run_program(program))

    async def _end(self, answered: Answered) -> Observation:
        changed = await self._changed()
        assert self._session is not None
        # Its place may be the one that the verdict's own session waits for.
        await self._session.close()
        graded = await self._grade(changed)
        return Observation(
            messages=answered.messages,
            tool_errors=answered.errors,
            reward=earned(graded.verdict, partial=self._partial),
            done=answered.submitted,
            truncated=not answered.submitted,
            state_id=_state_id(changed),
            metrics={
                "success": float(graded.verdict.resolved),
                "fail_to_pass": graded.verdict.repaired,
                "pass_to_pass": graded.verdict.kept,
                "suite_ran": float(graded.ran),
                "grading_s": graded.seconds,
            },
        )

    async def _grade(self, changed: Mapping[str, FileChange]) -> Grade:
        return await grade(self._sandbox, self._base, self._metadata, changed, self._limits)

    async def _changed(self) -> dict[str, FileChange]:
        """What the copy has that the base has not; all of the package is gone if the copy cannot be read.

        Raises:
            SessionEnded: the session was ended from outside, for no program of the policy sees it.
        """
        assert self._session is not None
        try:
            return await self._session.changed()
        except SandboxError:
            return lost(self._metadata)

    async def _state(self) -> str:
        return _state_id(await self._changed())


def _state_id(changed: Mapping[str, FileChange]) -> str:
    digest = hashlib.sha256()
    for path, change in sorted(changed.items()):
        after = b"" if change.after is None else change.after
        digest.update(f"{path!r} {change.after is None} {len(after)} ".encode("utf-8", "surrogateescape") + after)
    return digest.hexdigest()
