"""The process that serves an environment's class, as slimrl's own process sees it."""

import asyncio
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slimrl.agent.environment import EnvironmentFailure
from slimrl.agent.isolation.environment_process import EnvironmentProcess
from slimrl.agent.isolation.interpreter import OtherInterpreter, call_elsewhere
from slimrl.agent.isolation.remote_environment import RemoteEnvironment

log = logging.getLogger(__name__)

READY_S = 120.0
"""Deadline for the import of an environment's class; some import for seconds"""
_FUNCTIONS = "slimrl.agent.isolation.serve_class"


class EnvironmentServer:
    """Makes environments that are children of one process, which is started when the first one is needed, and again
    when it has ended.

    Args:
        python: the interpreter that has what the environment needs.
        environment: import path `module:Class`.
        arguments: of each instance.
        close_s: seconds that an instance may take to close when its trajectory is over.
    """

    def __init__(self, python: Path, environment: str, arguments: Mapping[str, Any], close_s: float) -> None:
        self._python, self._environment, self._arguments, self._close_s = python, environment, arguments, close_s
        self.roles: tuple[str, ...] = ()
        """Those that the class says it has, once it was checked"""
        self._process: OtherInterpreter | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Holds the socket; this user's alone, so that no other can connect"""
        self._starting: asyncio.Future[None] | None = None
        """The start that is under way: a trajectory that gives up waiting does not end it for the others"""

    def __call__(self) -> RemoteEnvironment:
        return RemoteEnvironment(EnvironmentProcess(self.socket, self._environment))

    def check(self, roles: Iterable[str] = ()) -> None:
        """Import the class in the interpreter, and let it check its arguments.

        Args:
            roles: those that the recipe names.

        Raises:
            ValueError: there is no such class, it refuses the arguments, or has not these roles.
        """
        try:
            job = {**self._job, "roles": list(roles)}
            self.roles = tuple(call_elsewhere(self._python, f"{_FUNCTIONS}:check", job, READY_S))
        except OSError as error:
            raise ValueError(f"{self._python} does not start: {error}") from error

    async def socket(self) -> str:
        """Path of the socket of the process, which runs.

        Raises:
            EnvironmentFailure: it does not start.
        """
        while self._process is None or self._process.exit_code is not None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            starting = self._starting
            try:
                await asyncio.shield(starting)
            finally:
                if starting.done() and self._starting is starting:
                    self._starting = None
        assert self._folder is not None
        return _socket_in(self._folder)

    async def aclose(self) -> None:
        """End the process and its children, after a start that is under way."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the process and its children. No start may be under way."""
        process, self._process = self._process, None
        if process is not None:
            process.end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @property
    def _job(self) -> dict[str, Any]:
        return {"environment": self._environment, "arguments": self._arguments}

    def _start(self) -> None:
        if self._process is not None:
            code = self._process.exit_code
            log.warning("%s: its process ended with code %s; it is started anew", self._environment, code)
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="slimrl-environment-", ignore_cleanup_errors=True)
        job = self._job | {"socket_path": _socket_in(self._folder), "close_s": self._close_s}
        try:
            process = OtherInterpreter(self._python, f"{_FUNCTIONS}:serve", job)
            try:
                process.await_line(READY_S)
            except ValueError:
                process.end()
                raise
        except (ValueError, OSError) as error:
            self.close()
            raise EnvironmentFailure(f"{self._environment}: its process does not start: {error}") from error
        self._process = process


def _socket_in(folder: "tempfile.TemporaryDirectory[str]") -> str:
    return str(Path(folder.name) / "socket")
