"""Software repair for a published agent behind the gateway (`agent.command_task`): it works with its own tools in a
folder that holds the package with the bug, and the verdict is the environment's.

The command never has the task's metadata, so it has neither the patch nor the names of the tests.
"""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.environments.software_repair.environment import SoftwareRepair
from slimrl.environments.software_repair.grading import earned, grade, suite_limits
from slimrl.environments.software_repair.working_copy import changed_files, planted, task_text


class RepairTask:
    """One task of repair, with the arguments of SoftwareRepair."""

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

    check = SoftwareRepair.check

    async def fill(self, line: Mapping[str, Any], work: Path) -> Mapping[str, Any]:
        self._metadata: Mapping[str, Any] = line["metadata"]
        self._base = self._folder / self._metadata["base"]
        await asyncio.to_thread(self._copy, work)
        *system, issue = line["messages"]
        told = {"role": "user", "content": task_text(str(issue["content"]), hidden=self._hidden)}
        return {"id": line["id"], "messages": [*system, told], "label": None, "metadata": {}}

    async def judge(self, work: Path) -> float:
        changed = await asyncio.to_thread(changed_files, self._base, work, self._metadata)
        graded = await grade(self._sandbox, self._base, self._metadata, changed, self._limits)
        return earned(graded.verdict, partial=self._partial)

    def _copy(self, work: Path) -> None:
        shutil.copytree(self._base, work, dirs_exist_ok=True)
        for path, content in planted(self._base, self._metadata, hidden=self._hidden).items():
            if content is None:
                (work / path).unlink()
            else:
                (work / path).write_bytes(content)
