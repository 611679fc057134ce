"""The verdict on a repair: the suite of a fresh copy, with nothing of the policy's but the package's code.

1. A new session begins with the sound base: its tests, and its settings of pytest.
2. Of what the policy changed, the Python files of the package itself are carried over: neither tests nor conftest.py,
   nor files outside of the package, such as sitecustomize.py, plugins and settings of pytest.
3. A file of two tests with random names goes first, of which one passes and one fails. A run that does not say so, or
   does not end as one in which a test failed, tells nothing: no test counts as passed.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from slimrl.agent.sandbox.interface import Ended, FileChange, Language, Program, SandboxError
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxLimits
from slimrl.environments.software_repair.suite import Verdict, statuses, suite_command, verdict

LIMITS = SandboxLimits(cpu_s=60, memory_bytes=1024**3, disk_bytes=128 * 1024**2)
"""Limits of a copy; `wall_s` is that of a call"""
REGRESSION = 0.5
"""What a repair that breaks other tests loses (`reward: partial`)"""
REMOVE = "import json, os, sys\nfor path in json.load(sys.stdin):\n    os.remove(path)"
OUTPUT_BYTES = 8 * 1024**2
NOTHING = Verdict(repaired=0.0, kept=0.0)
_FAILED = 1
"""Exit status of pytest if a test failed"""


@dataclass(frozen=True, kw_only=True)
class Grade:
    verdict: Verdict
    ran: bool
    """Whether the suite ran to its end, and its log tells what happened"""
    seconds: float
    log: str


def suite_limits(suite_s: int) -> SandboxLimits:
    """Limits of the verdict's tests.

    Args:
        suite_s: their deadline, in seconds of wall clock and of CPU time of a process.
    """
    return replace(LIMITS, wall_s=float(suite_s), cpu_s=suite_s)


def earned(verdict: Verdict, *, partial: bool) -> float:
    """1 for a repair that resolves the task, else 0; with `partial` the fraction of the tests that it repairs, less
    REGRESSION if others fail that passed."""
    if not partial:
        return float(verdict.resolved)
    return verdict.repaired - (REGRESSION if verdict.kept < 1 else 0.0)


def counts(path: str, metadata: Mapping[str, Any]) -> bool:
    """Whether a changed file is part of the repair: a Python file of the package itself."""
    of = PurePosixPath(path)
    within = any(of.is_relative_to(name) for name in metadata["code"])
    in_tests = any(of.is_relative_to(name) for name in metadata["tests"])
    return within and not in_tests and of.suffix == ".py" and of.name != "conftest.py" and ".." not in of.parts


async def grade(
    sandbox: SandboxPool,
    base: Path,
    metadata: Mapping[str, Any],
    changed: Mapping[str, FileChange],
    limits: SandboxLimits,
) -> Grade:
    """Run the suite.

    Args:
        base: the sound package.
        metadata: of the task.
        changed: files of the policy's copy that differ from the base.
        limits: of the suite.
    """
    mine = {path: change for path, change in changed.items() if counts(path, metadata)}
    name, passes, fails = (f"test_{secrets.token_hex(8)}" for _ in range(3))
    canary = f"def {passes}():\n    assert True\n\n\ndef {fails}():\n    assert False\n"
    session = await sandbox.session(Language.shell, folder=base, limits=limits)
    try:
        files = {path: change.after for path, change in mine.items() if change.after is not None}
        removed = [path for path, change in mine.items() if change.after is None]
        done = await session.run_program(Program(code=REMOVE, stdin=json.dumps(removed).encode()))
        if done.ended is not Ended.ok:
            raise SandboxError(f"files cannot be removed: {done.stderr.strip()}")
        await session.put(files | {f"{name}.py": canary.encode()})
        command = suite_command([f"{name}.py", *metadata["tests"]])
        run = Program(code=f"export PYTHONHASHSEED=0; {command}", language=Language.shell)
        result = await session.run_program(run, replace(limits, output_bytes=OUTPUT_BYTES))
    finally:
        await session.close()
    found = statuses(result.stdout)
    canaries = (found.get(f"{name}.py::{passes}"), found.get(f"{name}.py::{fails}"))
    ran = canaries == ("PASSED", "FAILED") and result.exit_status == _FAILED
    said = verdict(found, metadata["FAIL_TO_PASS"], metadata["PASS_TO_PASS"]) if ran else NOTHING
    return Grade(verdict=said, ran=ran, seconds=result.seconds, log=result.stdout)
