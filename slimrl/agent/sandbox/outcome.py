"""Why a run ended, from what the operating system says of it."""

import re

from slimrl.agent.sandbox.interface import Ended
from slimrl.config.schema.agent import SandboxLimits

_KILLED = (-9, 128 + 9)
"""A process that SIGKILL ended, and a shell whose last command it ended."""
_CPU_FRACTION = 0.5
"""The kernel enforces the limit by whole ticks, and reports exact times, which may be shorter by a good part."""
_MEMORY_ERROR = re.compile(r"^(\w+\.)*\w*MemoryError\b")


def out_of_cpu_time(status: int, cpu_s: float, limits: SandboxLimits) -> bool:
    """Whether the kernel ended a program at its limit of CPU time."""
    return status in _KILLED and cpu_s > _CPU_FRACTION * limits.cpu_s


def why(status: int, stderr: str) -> Ended:
    """The reason why a program ended that was not stopped at a limit.

    Args:
        status: its exit code; the negative number of the signal that ended it, or 128 + that number from a shell.
        stderr: of Python, whose last line names the exception.
    """
    if status == 0:
        return Ended.ok
    if status < 0:
        return Ended.killed
    lines = stderr.rstrip().rsplit("\n", 1)
    return Ended.memory if _MEMORY_ERROR.match(lines[-1]) else Ended.error
