"""The host's end of a warm interpreter: starts it in bwrap, sends it runs, and receives how they end."""

import array
import asyncio
import fcntl
import json
import logging
import os
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimrl.agent.sandbox import visible
from slimrl.agent.sandbox.bwrap import bwrap_command
from slimrl.agent.sandbox.capture import Capture
from slimrl.agent.sandbox.interface import SandboxError
from slimrl.agent.sandbox.user_namespace import open_user_namespace
from slimrl.config.schema.agent import SandboxLimits

logger = logging.getLogger(__name__)
START_S = 60.0
"""Deadline of the warm interpreter's start, with the import of its packages."""
END_S = 10.0
"""Deadline of a process's end after it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a run's first process ended."""

    status: int
    """Exit code, or the negative number of a signal."""
    cpu_s: float
    """CPU time of the process and of the child processes that it waited for."""
    over_memory: bool


class Run:
    """A started run, until its end is reported."""

    def __init__(self, client: "ZygoteClient", number: int, output: Capture) -> None:
        self._client, self.number = client, number
        self.output = output
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def wait(self, timeout_s: float, *others: "asyncio.Future[Any]") -> bool:
        """Wait until the run has ended, has written too much, or one of the others is done. Returns False if the time
        was over first."""
        full = asyncio.ensure_future(self.output.full.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [self.exited, full, *others]
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            full.cancel()
        return bool(done)

    async def end(self) -> tuple[str, str]:
        """Kill what still runs, and close the pipes.

        Returns:
            What was still in them, (stdout, stderr).

        Raises:
            SandboxError: it did not end in time and was given up, or the warm interpreter did not answer in time and so
                the whole sandbox was ended.
        """
        try:
            if not self.exited.done():
                answered = self._client.kill(self.number)
                await asyncio.wait([self.exited], timeout=END_S)
                if not self.exited.done() and not answered.done():
                    await self._client.close()
                    raise SandboxError(f"the sandbox did not answer within {END_S:g} s and was ended")
            if not self.exited.done():
                self._client.give_up(self.number)
                raise SandboxError(f"a run did not end within {END_S:g} s and was given up; others go on")
            return self.output.take()
        finally:
            self.output.close()


class ZygoteClient:
    """The connection to one warm interpreter. Used within one event loop.

    Args:
        packages: what it imports, if it is installed.
        folders: with those over which sessions work.
    """

    def __init__(self, packages: Sequence[str], folders: Path) -> None:
        self._packages, self._folders = packages, folders
        self.overlay = False
        """Whether sessions can work in overlays over the folders."""
        self._runs: dict[int, Run] = {}
        self._kills: dict[int, asyncio.Future[None]] = {}
        """Kills that were not answered yet, by the run's number."""
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        """Messages that are not sent yet, with their descriptors"""
        self._count = 0
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self.broken = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Raises SandboxError: bwrap is missing, or namespaces are not allowed."""
        installed = visible.installed(self._packages)
        namespace = open_user_namespace() if os.getuid() == 0 else None
        files = {path: memory_file(text.encode()) for path, text in visible.environment_files(installed).items()}
        control = self._theirs.fileno()
        with tempfile.TemporaryFile() as log:
            try:
                self._process = subprocess.Popen(
                    bwrap_command(control, namespace, self._packages, installed, self._folders, files),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[control, *files.values(), *([] if namespace is None else [namespace])],
                    start_new_session=True,  # Ctrl-C reaches the driver alone
                )
            except OSError as error:
                raise SandboxError(f"cannot start bwrap, install bubblewrap: {error}") from error
            finally:
                self._theirs.close()
                for file in files.values():
                    os.close(file)
                if namespace is not None:
                    os.close(namespace)
            asyncio.get_running_loop().add_reader(self._control, self._receive)
            try:
                await asyncio.wait([self._ready], timeout=START_S)
            except BaseException:
                await self.close()
                raise
            if not self._ready.done() or self._ready.exception():
                await self.close()
                log.seek(0)
                problem = log.read().decode(errors="replace").strip() or f"no answer within {START_S:g} s"
                raise SandboxError(f"the sandbox did not start: {problem}")

    def spawn(
        self,
        task: dict[str, str],
        limits: SandboxLimits,
        *,
        stdin: int,
        channel: int | None = None,
        folder: int | None = None,
        base: str = "",
        beside: Run | None = None,
        sees_base: bool = False,
    ) -> Run:
        """Start a run. The descriptors stay the caller's.

        Args:
            folder: descriptor of a tar file that becomes the session's folder.
            base: name of the folder over which the session works.
            beside: a session in whose files the run works.
            sees_base: whether it sees the folder with which that session began.
        """
        self._count += 1
        output = Capture(limits.output_bytes)
        run = Run(self, self._count, output)
        task_file = memory_file(json.dumps(task).encode())
        given = {"task": task_file, "stdin": stdin, "stdout": output.write_ends[0], "stderr": output.write_ends[1]}
        given |= {name: file for name, file in (("channel", channel), ("folder", folder)) if file is not None}
        request: dict[str, Any] = {"id": self._count, "limits": asdict(limits), "descriptors": list(given)}
        request |= {"base": base, "beside": None if beside is None else beside.number, "sees_base": sees_base}
        try:
            self._send(request, list(given.values()))
        except OSError as error:
            output.close()
            raise SandboxError(f"the sandbox takes no run: {error}") from error
        finally:
            os.close(task_file)
            output.started()
        self._runs[self._count] = run
        return run

    def kill(self, number: int) -> "asyncio.Future[None]":
        """Have the warm interpreter kill a run; the future is done when it has sent the signals, which it repeats until
        the run has ended."""
        answered = self._kills[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"kill": number})
        except OSError:
            self._fail("it takes no message")
        return answered

    def rest(self, number: int, on: bool) -> None:
        """Say that a session waits for its next code, or gets some: in between it takes no processor time."""
        try:
            self._send({"rest": number, "on": on})
        except OSError:
            self._fail("it takes no message")

    def give_up(self, number: int) -> None:
        """Wait no more for the end of a run that does not end, as of a process that waits within the kernel."""
        logger.warning("A run in the sandbox cannot be ended: what it holds stays taken until the kernel lets it go.")
        self._runs.pop(number, None)

    async def close(self) -> None:
        """End the sandbox with all that runs in it: its first process ends with the control socket."""
        self._fail("it was closed")
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, END_S)

    def _send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message after those that wait because the warm interpreter is behind. Raises OSError."""
        self._waiting.append((json.dumps(message).encode(), [os.dup(file) for file in files]))
        if len(self._waiting) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as it is taken now. Raises OSError."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            message, files = self._waiting[0]
            try:
                self._control.sendmsg(
                    [message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
                )
            except BlockingIOError:
                loop.add_writer(self._control, self._flush_later)
                return
            except OSError:
                self._drop_waiting()
                raise
            self._waiting.popleft()
            for file in files:
                os.close(file)
        loop.remove_writer(self._control)

    def _flush_later(self) -> None:
        try:
            self._flush()
        except OSError:
            self._fail("it takes no message")

    def _drop_waiting(self) -> None:
        while self._waiting:
            for file in self._waiting.popleft()[1]:
                os.close(file)

    def _receive(self) -> None:
        try:
            message = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._fail("it has ended")
            return
        report = json.loads(message)
        if "ready" in report:
            self.overlay = report["overlay"]
            self._ready.set_result(None)
            return
        if "killed" in report:
            if answered := self._kills.pop(report["killed"], None):
                answered.set_result(None)
            return
        number = report.pop("id")
        run = self._runs.pop(number, None)
        if run is None:
            return  # it was given up, or had a problem, which is reported before its end
        if "problem" in report:
            run.exited.set_exception(SandboxError(report["problem"]))
        else:
            run.exited.set_result(Exit(**report))

    def _fail(self, why: str) -> None:
        """Mark this interpreter as broken, and fail all that wait for it."""
        if self.broken:
            return
        self.broken = True
        self._drop_waiting()
        asyncio.get_running_loop().remove_reader(self._control)
        asyncio.get_running_loop().remove_writer(self._control)
        self._control.close()
        error = SandboxError(f"the sandbox cannot say what became of a run: {why}")
        futures: list[asyncio.Future[Any]] = [self._ready, *(run.exited for run in self._runs.values())]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen, also if nobody awaits it
        self._runs = {}


def memory_file(content: bytes) -> int:
    """A descriptor of an unnamed file that holds these bytes, at its start, and that nobody can change."""
    file = os.memfd_create("slimrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    return file
