"""Tasks of SWE-bench (arXiv:2310.06770), each in its published container image: the policy reads an issue, works in the
whole repository and repairs it; the task's eval script is the verdict.

1. Each trajectory has a container of the task's image, without a network. It is removed at the end.
2. Each call is a program of its own there, with a deadline; one that is too late ends alone.
3. `submit`, a turn without a call, and the last turn end the episode with the verdict (verdict.py), for which what the
   policy changed goes into a fresh container.

It runs in slimrl's own process, for it needs the run's sandbox, whose backend is `container`.
"""

from pathlib import Path
from typing import Any

from slimrl.agent.environment import Observation, Turn, error_text
from slimrl.agent.sandbox.interface import SandboxError, SessionEnded
from slimrl.agent.sandbox.pool import PooledSession, SandboxPool
from slimrl.agent.tool_call import ToolCall
from slimrl.config.schema.agent import SandboxLimits
from slimrl.data.prompt import Prompt
from slimrl.environments.software_repair.answered_calls import Answered, answer_calls
from slimrl.environments.software_repair.grading import earned
from slimrl.environments.software_repair.tools import TOOLS
from slimrl.environments.swe_bench.data import IMAGES
from slimrl.environments.swe_bench.repository import FOLDER, Repository
from slimrl.environments.swe_bench.verdict import Verdict, verdict
from slimrl.environments.venvs import venv_python

PROCESSES = 512
FILE_BYTES = 4 * 1024**3
"""Largest file that a container may write"""
CPU_S = 24 * 3600
"""CPU time of a process: containers end by wall clock."""
SHOWN_IMAGES = 5
TASK = (
    "{issue}\n\nThe folder {folder} holds the repository. Repair the code so that the issue is resolved. Changes of "
    "tests and of their settings do not count. There is no network. Call `submit` when you are done."
)


class SweBench:
    """One task.

    Args:
        folder: that `slimrl.environments.swe_bench.data` wrote; its list of images is looked at before a run.
        reward: `resolved`: 1 if all tests pass that must, else 0. `partial`: the fraction of the failing tests that
            pass now, less REGRESSION if others fail that passed.
        command_s: deadline of a command of the policy.
        suite_s: deadline of the eval script.
        memory_gb: of a container.
    """

    def __init__(
        self,
        sandbox: SandboxPool,
        *,
        folder: str,
        reward: str = "resolved",
        command_s: int = 60,
        suite_s: int = 1800,
        memory_gb: int = 4,
    ) -> None:
        self._sandbox, self._partial = sandbox, reward == "partial"
        self._command_s, self._suite_s = command_s, suite_s
        self._limits = SandboxLimits(
            cpu_s=CPU_S, memory_bytes=memory_gb * 1024**3, processes=PROCESSES, disk_bytes=FILE_BYTES
        )
        self._session: PooledSession | None = None

    @classmethod
    def check(cls, sandbox: SandboxPool, *, folder: str, reward: str = "resolved", **numbers: int) -> None:
        """Raises ValueError for arguments that make no environment, images that are not here, and a missing virtual
        environment."""
        if reward not in ("resolved", "partial"):
            raise ValueError(f"reward: {reward!r} is neither resolved nor partial")
        for name, number in numbers.items():
            if number <= 0:
                raise ValueError(f"{name}: {number} is not above 0")
        listed = Path(folder, IMAGES)
        if not listed.is_file():
            raise ValueError(f"folder: {folder} has no {IMAGES}: make the tasks first")
        venv_python("swe_bench")
        images = listed.read_text().split()
        if missing := sandbox.missing_images(images):
            shown = ", ".join(missing[:SHOWN_IMAGES])
            raise ValueError(
                f"{len(missing)} of the {len(images)} images in {listed} are not on this machine: {shown}. Pull them "
                f"first: xargs -n 1 docker pull < {listed}"
            )

    async def start(self, prompt: Prompt, *, seed: int, scratch: dict[str, Any]) -> Observation:
        self._prompt = prompt
        self._session = await self._sandbox.image_session(prompt.metadata["image"], self._limits)
        self._repository = Repository(self._session, self._limits)
        await self._repository.start()
        issue = str(prompt.messages[-1]["content"])
        asked = {"role": "user", "content": TASK.format(issue=issue, folder=FOLDER)}
        return Observation(messages=[*prompt.messages[:-1], asked], tools=TOOLS)

    async def step(self, turn: Turn) -> Observation:
        answered = await answer_calls(turn, self._do)
        if answered.submitted or turn.is_last or turn.finish_reason == "end":
            return await self._end(answered)
        return Observation(messages=answered.messages, tool_errors=answered.errors)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _do(self, call: ToolCall) -> str:
        """What a call of `bash` or `edit` answers."""
        try:
            if call.name == "edit":
                return await self._repository.edit(**call.arguments)
            return await self._repository.run(call.arguments["command"], self._command_s)
        except SessionEnded:
            return error_text("the container is lost")
        except (SandboxError, ValueError) as error:
            return error_text(str(error))

    async def _end(self, answered: Answered) -> Observation:
        said = await self._verdict()
        return Observation(
            messages=answered.messages,
            tool_errors=answered.errors,
            reward=earned(said, partial=self._partial),
            done=answered.submitted,
            truncated=not answered.submitted,
            metrics={
                "success": float(said.resolved),
                "resolved": float(said.published),
                "fail_to_pass": said.repaired,
                "pass_to_pass": said.kept,
                "suite_ran": float(said.ran),
                "grading_s": said.seconds,
            },
        )

    async def _verdict(self) -> Verdict:
        assert self._session is not None
        try:
            patch = await self._repository.changes()
        except (SessionEnded, SandboxError):
            return Verdict()  # the policy has stopped the container or removed the repository
        finally:
            # Its place may be the one that the verdict's own session waits for.
            await self._session.close()
        task, name = self._prompt.metadata, self._prompt.prompt_id
        return await verdict(self._sandbox, name, task, patch, self._limits, self._suite_s)
