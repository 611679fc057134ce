"""The verdict on a repair: the task's own eval script, in a fresh container of its image.

1. The policy's changes are applied there, without the files that do not count (counted.py).
2. The eval script puts the tests of the task in their place and runs them, up to a deadline.
3. swebench reads the log, in the environment's interpreter.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.sandbox.interface import Ended
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxLimits
from slimrl.environments.software_repair.suite import Verdict as OfSuite
from slimrl.environments.swe_bench.counted import apply_arguments
from slimrl.environments.swe_bench.repository import Repository
from slimrl.environments.venvs import venv_python

READ_S = 120.0
"""Deadline of reading a log"""


@dataclass(frozen=True, kw_only=True)
class Verdict(OfSuite):
    """What the log of an eval script says."""

    repaired: float = 0.0
    kept: float = 0.0
    published: bool = False
    """Whether swebench says that the task is resolved"""
    ran: bool = False
    """Whether the tests ran to their end, and the log tells what happened"""
    seconds: float = 0.0


UNCHANGED = Verdict(kept=1.0)
"""The verdict on a repair that changes nothing, for which no test has to run"""


async def verdict(
    sandbox: SandboxPool, instance_id: str, task: Mapping[str, Any], patch: bytes, limits: SandboxLimits, suite_s: float
) -> Verdict:
    """Run the tests.

    Args:
        task: metadata of the prompt.
        patch: what the policy changed.
        suite_s: deadline of the eval script.

    Raises:
        SandboxError: there is no container.
        ValueError: swebench cannot read the log.
    """
    if not patch:
        return UNCHANGED
    start = time.monotonic()
    session = await sandbox.image_session(task["image"], limits)
    try:
        repository = Repository(session, limits)
        if not await repository.apply(patch, apply_arguments(task["patch"], task["test_files"])):
            return Verdict(seconds=time.monotonic() - start)
        result = await repository.evaluate(task["eval_script"], suite_s)
    finally:
        await session.close()
    if result.ended not in (Ended.ok, Ended.error):
        return Verdict(seconds=time.monotonic() - start)
    said = await asyncio.to_thread(_read, instance_id, task, result.stdout)
    return Verdict(
        repaired=said["repaired"],
        kept=said["kept"],
        published=said["resolved"],
        ran=said["ran"],
        seconds=time.monotonic() - start,
    )


def _read(instance_id: str, task: Mapping[str, Any], log: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slimrl-log-") as folder:
        path, report = Path(folder, "log"), Path(folder, "report")
        path.write_text(log)
        arguments = {
            "instance_id": instance_id,
            "task": {name: value for name, value in task.items() if name != "eval_script"},
            "log": str(path),
            "report": str(report),
        }
        call_elsewhere(venv_python("swe_bench"), "slimrl.environments.swe_bench.package:grade", arguments, READ_S)
        said: dict[str, Any] = json.loads(report.read_text())
    return said
