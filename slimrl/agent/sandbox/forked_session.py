"""A session of the bubblewrap sandbox: a fork of the warm interpreter that stays.

Its channel is a socket: code goes in, ended by a NUL; the exit status comes back in a line of its own. What the code
wrote is in the pipes before that line, so it is read after it.
"""

import asyncio
import os
import signal
import socket
import time

from slimrl.agent.sandbox.interface import (
    Ended,
    Language,
    Program,
    Result,
    SandboxError,
    SessionEnded,
    check_code,
)
from slimrl.agent.sandbox.outcome import why
from slimrl.agent.sandbox.session_files import (
    FILES_S,
    SessionFiles,
    files_limits,
    printed,
)
from slimrl.agent.sandbox.session_folder import SessionFolder
from slimrl.agent.sandbox.zygote_client import ZygoteClient
from slimrl.agent.sandbox.zygote_run import run_program, run_result
from slimrl.config.schema.agent import SandboxLimits

MAX_STATUS_BYTES = 16
EXIT_S = 1.0
"""How long a process whose channel has ended may take to exit by itself."""


class ForkedSession(SessionFiles):
    """A session in a fork of the warm interpreter. Used within one event loop; executions wait for each other.

    Args:
        folder: with which it begins; None for none. It is closed with the session.
    """

    def __init__(
        self, client: ZygoteClient, language: Language, limits: SandboxLimits, folder: SessionFolder | None
    ) -> None:
        self._client, self._limits, self.folder = client, limits, folder
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
                folder=None if folder is None else folder.archive,
                base="" if folder is None else folder.base,
            )

    async def start(self) -> None:
        """Wait until the session has its folder and waits for code. Raises SandboxError if it does not get there."""
        async with self._lock:
            result = await self._execute("", FILES_S)
        if result.ended is not Ended.ok:
            await self.close()
            raise SandboxError(f"a session did not start ({result.ended.value}): {result.stderr.strip()}")

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        check_code(code)
        async with self._lock:
            return await self._execute(code, wall_s or self._limits.wall_s)

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        async with self._lock:
            return await self._run_beside(program, limits or self._limits)

    async def _with_files(self, program: Program) -> str:
        async with self._lock:
            limits = files_limits(program, self._limits)
            sees_base = self.folder is not None and bool(self.folder.base)
            return printed(await self._run_beside(program, limits, sees_base=sees_base))

    async def _run_beside(self, program: Program, limits: SandboxLimits, *, sees_base: bool = False) -> Result:
        if self._closed or self._run.exited.done():
            raise self._ended()
        try:
            return await run_program(self._client, program, limits, beside=self._run, sees_base=sees_base)
        except SandboxError as error:
            if self._run.exited.done():
                raise self._ended() from error
            raise

    def _ended(self) -> SessionEnded:
        """Says by which signal it was ended, if it was not closed."""
        exited = self._run.exited
        if self._closed or exited.exception() is not None or exited.result().status >= 0:
            return SessionEnded("the session has ended")
        return SessionEnded(f"the session was ended by {signal.Signals(-exited.result().status).name}")

    async def _execute(self, code: str, wall_s: float) -> Result:
        if self._closed:
            raise SessionEnded("the session has ended")
        start = time.monotonic()
        self._client.rest(self._run.number, False)
        asking = asyncio.ensure_future(self._ask(code))
        try:
            in_time = await self._wait(asking, wall_s)
        except BaseException:
            await self._end()
            raise
        status = asking.result() if asking.done() and not asking.cancelled() else None
        if status is None or self._run.output.full.is_set() or self._run.exited.done():
            stdout, stderr = await self._end(wait=in_time and not self._run.output.full.is_set())
            seconds = time.monotonic() - start
            return run_result(self._run, self._limits, stdout, stderr, seconds, in_time=in_time)
        stdout, stderr = self._run.output.take()
        self._client.rest(self._run.number, True)
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
        try:
            if wait:
                await asyncio.wait([self._run.exited], timeout=EXIT_S)
        finally:
            self._channel.close()
        try:
            return await self._run.end()
        finally:
            if self.folder is not None:
                self.folder.close()
