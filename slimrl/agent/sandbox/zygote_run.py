"""One program in a fork of the warm interpreter, from its start to its end."""

import os
import time

from slimrl.agent.sandbox.interface import Ended, Program, Result
from slimrl.agent.sandbox.outcome import out_of_cpu_time, why
from slimrl.agent.sandbox.zygote_client import Run, ZygoteClient, memory_file
from slimrl.config.schema.agent import SandboxLimits


async def run_program(
    client: ZygoteClient,
    program: Program,
    limits: SandboxLimits,
    *,
    beside: Run | None = None,
    sees_base: bool = False,
) -> Result:
    """Run a program.

    Args:
        beside: a session in whose files it works.
        sees_base: whether it sees the folder with which that session began.
    """
    start = time.monotonic()
    stdin = memory_file(program.stdin)
    try:
        task = {"language": program.language.value, "code": program.code}
        run = client.spawn(task, limits, stdin=stdin, beside=beside, sees_base=sees_base)
    finally:
        os.close(stdin)
    in_time = False
    try:
        in_time = await run.wait(limits.wall_s)
    finally:
        stdout, stderr = await run.end()
    return run_result(run, limits, stdout, stderr, time.monotonic() - start, in_time=in_time)


def run_result(run: Run, limits: SandboxLimits, stdout: str, stderr: str, seconds: float, *, in_time: bool) -> Result:
    """The result of a run that has ended, by itself or at a limit. Raises SandboxError if it never ran."""
    end = run.exited.result()
    if run.output.full.is_set():
        ended = Ended.output
    elif end.over_memory:
        ended = Ended.memory
    elif not in_time or out_of_cpu_time(end.status, end.cpu_s, limits):
        ended = Ended.timeout
    else:
        ended = why(end.status, stderr)
    stopped = ended is not why(end.status, stderr) or end.status < 0
    status = None if stopped else end.status
    return Result(stdout=stdout, stderr=stderr, exit_status=status, ended=ended, seconds=seconds)
