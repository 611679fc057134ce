"""Runs one command of the host with a deadline and a limit of output: for backends that are command lines."""

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slimrl.agent.sandbox.capture import Capture
from slimrl.agent.sandbox.interface import Ended, Result, SandboxError
from slimrl.agent.sandbox.outcome import why
from slimrl.agent.sandbox.zygote_client import memory_file
from slimrl.base.processes import end_group, ended
from slimrl.config.schema.agent import SandboxLimits


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to start, with its input and environment."""

    argv: Sequence[str]
    stdin: bytes = b""
    env: Mapping[str, str] | None = None
    """Environment variables; None for those of this process."""
    cwd: Path | None = None


async def run_command(
    command: Command, limits: SandboxLimits, stop: Callable[[], Awaitable[None]] | None = None
) -> Result:
    """Run a command to its end, or to its deadline or limit of output; its process group ends with it.

    Args:
        stop: called before the group is killed at a limit, for what the command has started elsewhere.

    Raises:
        SandboxError: there is no such command, or it does not end.
    """
    start = time.monotonic()
    output = Capture(limits.output_bytes)
    stdin = memory_file(command.stdin)
    try:
        process = subprocess.Popen(
            command.argv,
            stdin=stdin,
            stdout=output.write_ends[0],
            stderr=output.write_ends[1],
            env=command.env,
            cwd=command.cwd,
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise SandboxError(f"cannot start {command.argv[0]}: {error}") from error
    finally:
        os.close(stdin)
        output.started()
    in_time = False
    try:
        in_time = await _wait(process, output, limits.wall_s)
        stopped = not in_time or output.full.is_set()
        if stopped and stop is not None:
            await stop()
    finally:
        status = await end_group(process)
        stdout, stderr = output.take()
        output.close()
    if status is None:
        raise SandboxError(f"{command.argv[0]} does not end, though it was killed")
    if output.full.is_set():
        how = Ended.output
    elif not in_time:
        how = Ended.timeout
    else:
        how = why(status, stderr)
    exit_status = None if stopped or status < 0 else status
    return Result(stdout=stdout, stderr=stderr, exit_status=exit_status, ended=how, seconds=time.monotonic() - start)


async def _wait(process: "subprocess.Popen[bytes]", output: Capture, timeout_s: float) -> bool:
    """Wait until the process has ended or has written too much. Returns False if the time was over first."""
    waiting = [asyncio.ensure_future(end) for end in (ended(process), output.full.wait())]
    try:
        done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return bool(done)
