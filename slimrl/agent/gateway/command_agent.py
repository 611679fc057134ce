"""Runs a command for each trajectory, in a workspace and an environment of its own."""

import json
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slimrl.agent.gateway.agents import AgentFailed
from slimrl.agent.gateway.command_sandbox import INSIDE, LOOPBACK, handed_socket, sandboxed
from slimrl.agent.gateway.command_task import CommandTask
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.once_pipe import KEY_VARIABLE, OncePipe
from slimrl.agent.gateway.output_tail import OutputTail
from slimrl.agent.gateway.workspace import Workspace, command_environment, workspace
from slimrl.base.processes import end_group, ended
from slimrl.config.schema.agent import CommandSandboxConfig

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CommandAgent:
    """Gets the data line as JSON on its stdin; its whole process group ends with it."""

    words: Sequence[str]
    host: str
    """Host of the gateway, which the command asks without a proxy"""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command that the recipe adds"""
    sandbox: CommandSandboxConfig = field(default_factory=CommandSandboxConfig)
    make_task: Callable[[], CommandTask] | None = None
    """Makes what fills the folder of each trajectory's command and rewards it; None for an empty folder"""
    task_path: str = ""
    """Import path of the task's class"""

    async def run(self, line: Mapping[str, Any], connection: Connection, afterwards: AsyncExitStack) -> str:
        try:
            place = await afterwards.enter_async_context(workspace())
            task = None if self.make_task is None else self.make_task()
            if task is not None:
                line = await self._of_task(task.fill(line, place.work))
            code, said = await self._ran(line, connection, place)
            if task is not None:
                await self._of_task(_post_verdict(task, place, connection))
        except OSError as error:
            raise AgentFailed(f"{self.words[0]} cannot be started: {error}") from None
        if code:
            raise AgentFailed(f"{self.words[0]} ended with exit code {code}{said}")
        return f"{self.words[0]} ended with exit code 0{said}"

    async def _of_task(self, call: Awaitable[_T]) -> _T:
        """What a method of the task returns. Raises AgentFailed."""
        try:
            return await call
        except Exception as error:
            # A task's own code may raise anything.
            raise AgentFailed(f"{self.task_path} raised {error!r}") from error

    async def _ran(self, line: Mapping[str, Any], connection: Connection, place: Workspace) -> tuple[int, str]:
        """The command's exit code, and what it last wrote."""
        with ExitStack() as tails:
            outputs = {name: tails.enter_context(closing(OutputTail())) for name in ("stdout", "stderr")}
            code = await self._ended(line, connection, place, outputs)
            ends = [(name, outputs[name].end()) for name in ("stderr", "stdout")]
        parts = [f"; its {name} ends: {text}" for name, text in ends if text]
        return code, "".join(parts) or ", and wrote nothing to stderr or stdout"

    async def _ended(
        self, line: Mapping[str, Any], connection: Connection, place: Workspace, outputs: Mapping[str, OutputTail]
    ) -> int:
        """The command's exit code, once its process group has ended."""
        async with AsyncExitStack() as ours:
            control: socket.socket | None = None
            handed: socket.socket | None = None
            with ExitStack() as theirs:
                if self.sandbox.enabled and not self.sandbox.network:
                    control, handed = socket.socketpair()
                    ours.enter_context(control)
                    theirs.enter_context(handed)
                process = self._started(line, connection, place, outputs, handed)
            for output in outputs.values():
                output.started()
            try:
                if control is not None and (listening := await handed_socket(control)) is not None:
                    await ours.enter_async_context(connection.serve(listening))
                await ended(process)
            finally:
                code = await end_group(process)
        assert code is not None
        return code

    def _started(
        self,
        line: Mapping[str, Any],
        connection: Connection,
        place: Workspace,
        outputs: Mapping[str, OutputTail],
        handed: socket.socket | None,
    ) -> "subprocess.Popen[bytes]":
        """
        Args:
            handed: the sandbox's end of the socket through which the gateway gets its listening socket; None without a
                sandbox or with the host's network.
        """
        for content in (json.dumps(line), connection.reward_key):
            connection.handed.append(OncePipe(f"{content}\n".encode()))
        stdin, key = (pipe.read_end for pipe in connection.handed)
        words, files, seen = list(self.words), [key], place
        reached, host = connection, self.host
        if self.sandbox.enabled:
            seen, boot = INSIDE, None
            if handed is not None:
                reached, host = connection.at(LOOPBACK), LOOPBACK
                boot = handed.fileno(), connection.port
                files.append(handed.fileno())
            words = sandboxed(self.words, place, self.sandbox, boot)
        reaching = {**reached.variables(host), KEY_VARIABLE: str(key)}
        return subprocess.Popen(
            words,
            stdin=stdin,
            stdout=outputs["stdout"].write_end,
            stderr=outputs["stderr"].write_end,
            env=command_environment(seen, reaching, self.env),
            cwd=place.work,
            pass_fds=files,
            start_new_session=True,
        )


async def _post_verdict(task: CommandTask, place: Workspace, connection: Connection) -> None:
    """Raises what the task raises, and ApiError: its verdict is no finite number."""
    connection.post(await task.judge(place.work))
