"""Runs a command for each trajectory, in a workspace and an environment of its own."""

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from slimrl.agent.gateway.agents import AgentFailed
from slimrl.agent.gateway.command_sandbox import INSIDE, LOOPBACK, handed_socket, sandboxed
from slimrl.agent.gateway.connection import Connection
from slimrl.agent.gateway.once_pipe import KEY_VARIABLE, OncePipe
from slimrl.agent.gateway.output_tail import OutputTail
from slimrl.agent.gateway.workspace import Workspace, command_environment, workspace
from slimrl.base.processes import end_group, ended
from slimrl.config.schema.agent import CommandSandboxConfig


@dataclass(frozen=True, kw_only=True)
class CommandAgent:
    """Gets the data line as JSON on its stdin; its whole process group ends with it."""

    words: Sequence[str]
    host: str
    """Host of the gateway, which the command asks without a proxy"""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the command that the recipe adds"""
    sandbox: CommandSandboxConfig = field(default_factory=CommandSandboxConfig)

    async def run(self, line: Mapping[str, Any], connection: Connection, afterwards: AsyncExitStack) -> str:
        try:
            place = await afterwards.enter_async_context(workspace())
            code, said = await self._ran(line, connection, place)
        except OSError as error:
            raise AgentFailed(f"{self.words[0]} cannot be started: {error}") from None
        if code:
            raise AgentFailed(f"{self.words[0]} ended with exit code {code}{said}")
        return f"{self.words[0]} ended with exit code 0{said}"

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
