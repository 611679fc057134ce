"""A session of the bubblewrap sandbox: a fork of the warm interpreter that stays.

Its channel is a socket: code goes in, ended by a NUL; the exit status comes back in a line of its own. What the code
wrote is in the pipes before that line, so it is read after it.
"""

import asyncio
import os
import socket
import tarfile
import tempfile
import time
from pathlib import Path

from slimrl.agent.sandbox.interface import Ended, Language, Result, SessionEnded, check_code
from slimrl.agent.sandbox.outcome import out_of_cpu_time, why
from slimrl.agent.sandbox.zygote_client import Run, ZygoteClient
from slimrl.config.schema.agent import SandboxLimits

MAX_STATUS_BYTES = 16
EXIT_S = 1.0
"""How long a process whose channel has ended may take to exit by itself."""


class ForkedSession:
    """A session in a fork of the warm interpreter. Used within one event loop; executions wait for each other.

    Args:
        archive: descriptor of a tar file that becomes the session's folder; stays the caller's.
    """

    def __init__(self, client: ZygoteClient, language: Language, limits: SandboxLimits, archive: int | None) -> None:
        self._limits = limits
        self._lock = asyncio.Lock()
        self._closed = False
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        with theirs, open(os.devnull, "rb") as nothing:
            self._run = client.spawn(
                {"language": language.value, "code": ""},
                limits,
                stdin=nothing.fileno(),
                channel=theirs.fileno(),
                folder=archive,
            )

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        check_code(code)
        async with self._lock:
            if self._closed:
                raise SessionEnded("the session has ended")
            start = time.monotonic()
            asking = asyncio.ensure_future(self._ask(code))
            try:
                in_time = await self._wait(asking, wall_s or self._limits.wall_s)
            except BaseException:
                await self._end()
                raise
            status = asking.result() if asking.done() and not asking.cancelled() else None
            if status is None or self._run.output.full.is_set() or self._run.exited.done():
                stdout, stderr = await self._end(wait=in_time and not self._run.output.full.is_set())
                seconds = time.monotonic() - start
                return run_result(self._run, self._limits, stdout, stderr, seconds, in_time=in_time)
            stdout, stderr = self._run.output.take()
            return Result(
                stdout=stdout,
                stderr=stderr,
                exit_status=status,
                ended=why(status, stderr),
                seconds=time.monotonic() - start,
            )

    async def close(self) -> None:
        async with self._lock:
            if not self._closed:
                await self._end()

    async def _wait(self, asking: "asyncio.Future[int | None]", timeout_s: float) -> bool:
        """Wait as Run.wait does. Then nothing reads the channel any more, so it may be closed and its number be
        another's."""
        try:
            return await self._run.wait(timeout_s, asking)
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _ask(self, code: str) -> int | None:
        """The exit status; None if the session's process has gone or does not keep to its protocol."""
        loop = asyncio.get_running_loop()
        answer = b""
        try:
            await loop.sock_sendall(self._channel, code.encode("utf-8", "replace") + b"\0")
            while not answer.endswith(b"\n"):
                more = await loop.sock_recv(self._channel, MAX_STATUS_BYTES)
                answer += more
                if not more or len(answer) > MAX_STATUS_BYTES:
                    return None
            return int(answer)
        except (OSError, ValueError):
            return None

    async def _end(self, *, wait: bool = False) -> tuple[str, str]:
        """What the session still had written. `wait`: it is about to exit itself, so that its status becomes known."""
        self._closed = True
        if wait:
            await asyncio.wait([self._run.exited], timeout=EXIT_S)
        self._channel.close()
        return await self._run.end()


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


def folder_archive(folder: Path) -> int:
    """A descriptor of an unnamed tar file with what the folder holds, at its start."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, arcname=".")
        file.seek(0)
        return os.dup(file.fileno())
