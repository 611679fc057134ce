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
from slimrl.data.threads import in_thread, reportable

STDERR_CHARS = 2000
"""Of the end of a command's stderr, in the cause of its failure"""
END_S = 10.0
"""How long a killed process may take to be gone"""


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
            process = await asyncio.create_subprocess_exec(
                *self.words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **connection.variables(self.host)},
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailed(f"{self.words[0]} cannot be started: {error}") from error
        assert process.stdin is not None
        assert process.stderr is not None
        reading = asyncio.create_task(_end_of(process.stderr))
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.close()
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the command left behind
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
            stderr = await _within(reading)
        if code:
            said = f": {stderr}" if stderr else ", and wrote nothing to stderr"
            raise AgentFailed(f"{self.words[0]} ended with exit code {code}{said}")


async def _end_of(stream: asyncio.StreamReader) -> str:
    """The last characters of a stream, once it has ended."""
    end = b""
    while part := await stream.read(65536):
        end = (end + part)[-4 * STDERR_CHARS :]
    return end.decode(errors="replace").strip()[-STDERR_CHARS:]


async def _within(reading: "asyncio.Task[str]") -> str:
    """What was read; nothing if a process outside of the group holds the stream open."""
    done, _ = await asyncio.wait([reading], timeout=END_S)
    if not done:
        reading.cancel()
    return reading.result() if done else ""


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
