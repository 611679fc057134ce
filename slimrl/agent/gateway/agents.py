"""The two ways to run an agent for a trajectory: a command, and a function of Python."""

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from slimrl.agent.gateway.connection import Connection
from slimrl.agent.sandbox.zygote_client import memory_file
from slimrl.data.threads import in_thread, reportable

STDERR_CHARS = 2000
"""Of the end of a command's stderr, in the cause of its failure"""
END_S = 10.0
"""How long a killed process may take to be gone"""
PIPE_S = 1.0
"""How long its stderr may then stay open"""


class AgentFailed(Exception):
    """The agent raised, or its command ended with another exit code than 0."""


class Agent(Protocol):
    async def run(self, line: Mapping[str, Any], connection: Connection) -> None:
        """Act for one trajectory; it is cancelled at the trajectory's deadline.

        Args:
            line: of the data: `id`, `messages`, `label`, `metadata`.

        Raises:
            AgentFailed: says why.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CommandAgent:
    """Runs a command, with the data line as JSON on its stdin; its whole process group ends with it."""

    words: Sequence[str]
    host: str
    """Of the gateway, which is asked without a proxy"""

    async def run(self, line: Mapping[str, Any], connection: Connection) -> None:
        try:
            code, said = await self._ran(line, connection)
        except OSError as error:
            raise AgentFailed(f"{self.words[0]} cannot be started: {error}") from error
        if code:
            cause = f": {said}" if said else ", and wrote nothing to stderr"
            raise AgentFailed(f"{self.words[0]} ended with exit code {code}{cause}")

    async def _ran(self, line: Mapping[str, Any], connection: Connection) -> tuple[int, str]:
        """The command's exit code, and what it last wrote to stderr if that is not 0."""
        stderr = _Stderr()
        try:
            code = await self._ended(line, connection, stderr.write_end)
            return code, await stderr.end() if code else ""
        finally:
            stderr.close()

    async def _ended(self, line: Mapping[str, Any], connection: Connection, stderr: int) -> int:
        """The command's exit code, once its process group has ended."""
        stdin = memory_file(json.dumps(line).encode() + b"\n")
        try:
            # No pipe of asyncio's: it would wait for whatever the command leaves behind to close it.
            process = await asyncio.create_subprocess_exec(
                *self.words,
                stdin=stdin,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **connection.variables(self.host)},
                start_new_session=True,
            )
        finally:
            os.close(stdin)
            os.close(stderr)
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the command left behind
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()


class _Stderr:
    """Reads what a command writes to a pipe, and keeps the end of it. The command's starter closes the write end."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._kept = b""
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    async def end(self) -> str:
        """The last characters, once the pipe is closed; a process outside of the group may hold it open for a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PIPE_S):
                await self._closed.wait()
        return self._kept.decode(errors="replace").strip()[-STDERR_CHARS:]

    def close(self) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def _read(self) -> None:
        part = os.read(self._read_end, 65536)
        self._kept = (self._kept + part)[-4 * STDERR_CHARS :]
        if not part:
            self._loop.remove_reader(self._read_end)
            self._closed.set()


@dataclass(frozen=True, kw_only=True)
class FunctionAgent:
    """Calls a function with the data line and the connection: an asynchronous one here, another in its own thread."""

    function: Callable[[Mapping[str, Any], Connection], Any]
    path: str
    """Its import path"""

    async def run(self, line: Mapping[str, Any], connection: Connection) -> None:
        try:
            if inspect.iscoroutinefunction(self.function):
                await _awaited(self.function, line, connection)
            else:
                await in_thread(lambda: self.function(line, connection))
        except Exception as error:
            # A task's own code may raise anything.
            raise AgentFailed(f"{self.path} raised {error!r}") from error


async def _awaited(function: Callable[..., Any], line: Mapping[str, Any], connection: Connection) -> None:
    try:
        await function(line, connection)
    except SystemExit as error:
        # A SystemExit in a task would end the event loop, and the run with it.
        raise reportable(error) from error
