"""Sandboxes as containers, through the command line of docker or podman.

A run is a container of its own. A session is a container that stays; each execution is a new process in it, so files
remain and variables do not. The image may be another one for each session: that of a trajectory, whose own files the
session may work in (`image_session`).
"""

import asyncio
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimrl.agent.sandbox.interface import (
    Ended,
    Language,
    Program,
    Result,
    SandboxError,
    SessionEnded,
    check_code,
)
from slimrl.agent.sandbox.process import Command, run_command
from slimrl.agent.sandbox.session_files import SessionFiles, files_limits, printed
from slimrl.agent.sandbox.session_folder import ArchivedFolder, SessionFolder
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits

COMMAND_S = 120.0
"""Deadline of the start of a container, which may load an image, and of its end."""
FOLDER = Path(tempfile.gettempdir())
"""Folder in which the container commands run: podman's monitor writes a file `oom` there if a container runs out of
memory."""
WORK = "/tmp/work"
INTERPRETERS = {Language.python: ["python3", "-I", "-c"], Language.shell: ["bash", "-c"]}
STARTED = "slimrl: started"
"""First line of stderr, before the program can write any: without it the command failed, not the program."""
_SIGNAL = 128
"""Offset of a container's exit code where a signal ended its program: 128 + the signal's number"""
_DESCRIPTORS = 1024
_OWN_FILES = ("--cap-add=CHOWN", "--cap-add=DAC_OVERRIDE", "--cap-add=FOWNER")
"""Arguments of `run` where the image's root works in the image's files: it owns what it finds there, whoever did."""
_OF_THE_CONTAINER = ("cpu_s", "memory_bytes", "processes", "disk_bytes")
"""Limits that the kernel enforces for all that runs in a container."""
_REMOVE_LEFT = 'cat; left=$("$0" ps --all --quiet --filter "label=$1"); [ -z "$left" ] || "$0" rm --force $left'
"""Waits until its input ends, as it does however the process ends that holds it open."""
_REMOVALS, _RETRY_S = 3, 0.5
"""podman refuses to remove a container that ends at that moment."""


class ContainerSandbox:
    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sessions: set[ContainerSession] = set()
        self._label = f"slimrl={uuid.uuid4().hex}"
        """On all containers of this sandbox"""
        self._remover: subprocess.Popen[bytes] | None = None
        """Process that removes them if this one is killed"""

    async def run(self, program: Program, limits: SandboxLimits | None = None, *, image: str | None = None) -> Result:
        limits = limits or self._config.limits
        name = f"slimrl-{uuid.uuid4().hex}"
        argv = [*self._running(name, limits), "--interactive", *_confinement(limits)]
        argv += [image or self._config.image, *_started(program.language, program.code)]
        try:
            command = Command(argv=argv, stdin=program.stdin, cwd=FOLDER)
            return _of_program(await run_command(command, limits, lambda: self._remove(name)), program.language)
        except asyncio.CancelledError:
            await self._remove(name)
            raise

    async def session(
        self,
        language: Language = Language.python,
        *,
        folder: Path | None = None,
        limits: SandboxLimits | None = None,
        image: str | None = None,
    ) -> "ContainerSession":
        limits = limits or replace(self._config.limits, cpu_s=self._config.session_cpu_s)
        session = self._new_session(language, limits, WORK)
        try:
            await self._start(session, [*_confinement(limits), image or self._config.image])
            archive = b""
            if folder is not None:
                session.folder = begun = await asyncio.to_thread(ArchivedFolder, folder)
                archive = begun.read()
            unpack = f"mkdir -p {WORK}" + (f" && tar -xf - -C {WORK}" if archive else "")
            argv = [self._config.command, "exec", "--interactive", session.name, "sh", "-c", unpack]
            await self._control(argv, archive)
        except BaseException:
            await session.close()
            raise
        return session

    async def image_session(self, image: str, limits: SandboxLimits) -> "ContainerSession":
        session = self._new_session(Language.shell, limits, "/")
        try:
            # A pull would take longer than the deadline of a start.
            await self._start(session, ["--pull=never", *_OWN_FILES, image])
        except BaseException as error:
            await session.close()
            if not isinstance(error, SandboxError):
                raise
            missing = await asyncio.to_thread(self.missing_images, [image])
            if not missing:
                raise
            pull = f"{self._config.command} pull {image}"
            raise SandboxError(f"there is no image {image} on this machine. Run: {pull}") from error
        return session

    def missing_images(self, images: Sequence[str]) -> list[str]:
        """Raises SandboxError: the command does not run."""
        look = [self._config.command, "image", "inspect", "--format", "{{.Id}}"]
        try:
            # All at once: thousands, one by one, would take minutes.
            if not _problem([*look, *images]):
                return []
            if said := _problem([self._config.command, "image", "ls", "--quiet"]):
                raise SandboxError(f"{self._config.command} image ls: {said}")
            return [image for image in images if _problem([*look, image])]
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self._config.command} image inspect: {error}") from error

    def _new_session(self, language: Language, limits: SandboxLimits, work: str) -> "ContainerSession":
        session = ContainerSession(self, self._config.command, language, limits, work)
        self._sessions.add(session)
        return session

    async def _start(self, session: "ContainerSession", arguments: Sequence[str]) -> None:
        """Start a session's container, which does nothing by itself.

        Args:
            arguments: of `run`, besides those of all containers; the last is the image.
        """
        argv = [*self._running(session.name, session.limits), "--detach"]
        await self._control([*argv, *arguments, "sleep", "infinity"])

    def _running(self, name: str, limits: SandboxLimits) -> list[str]:
        """The command line of `run` as far as it is that of all containers. Raises SandboxError."""
        command = self._config.command
        if self._remover is None:
            try:
                self._remover = subprocess.Popen(
                    ["sh", "-c", _REMOVE_LEFT, command, self._label],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=FOLDER,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"sh cannot be started: {error}") from error
        return [command, "run", "--rm", f"--label={self._label}", *_isolation(name, limits)]

    async def close(self) -> None:
        for session in list(self._sessions):
            await session.close()
        if self._remover is not None:
            self._remover.kill()
            self._remover.communicate(timeout=COMMAND_S)
            self._remover = None

    async def remove(self, session: "ContainerSession") -> None:
        self._sessions.discard(session)
        await self._remove(session.name)

    async def _remove(self, name: str) -> None:
        """End a container, if it has not ended by itself meanwhile."""
        for _ in range(_REMOVALS):
            try:
                await self._control([self._config.command, "rm", "--force", name])
                return
            except SandboxError as error:
                if "no such container" in str(error).lower():
                    return
                failure = error
                await asyncio.sleep(_RETRY_S)
        raise failure

    async def runs_still(self, name: str) -> bool:
        try:
            said = await self._control([self._config.command, "inspect", "--format", "{{.State.Running}}", name])
        except SandboxError:
            return False
        return said.strip() == b"true"

    async def _control(self, argv: list[str], stdin: bytes = b"") -> bytes:
        """What the command prints. Raises SandboxError if it fails or takes too long. If this is cancelled, it ends
        with the command: nothing could remove a container that is yet to start."""

        def command() -> bytes:
            return subprocess.run(
                argv, input=stdin, cwd=FOLDER, capture_output=True, check=True, timeout=COMMAND_S
            ).stdout

        running = asyncio.ensure_future(asyncio.to_thread(command))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
        except subprocess.CalledProcessError as error:
            problem = error.stderr.decode(errors="replace").strip()
            raise SandboxError(f"{' '.join(argv[:2])}: {problem}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{' '.join(argv[:2])}: {error}") from error


class ContainerSession(SessionFiles):
    """
    Args:
        work: folder in which its programs run.
    """

    def __init__(
        self, sandbox: ContainerSandbox, command: str, language: Language, limits: SandboxLimits, work: str
    ) -> None:
        self._sandbox, self._command, self._work = sandbox, command, work
        self._language, self.limits = language, limits
        self.name = f"slimrl-{uuid.uuid4().hex}"
        """Name of the container"""
        self.folder: SessionFolder | None = None
        """With which it began."""
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        check_code(code)
        limits = replace(self.limits, wall_s=wall_s or self.limits.wall_s)
        return await self._execute(Program(code=code, language=self._language), limits)

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        limits = limits or self.limits
        if any(getattr(limits, name) > getattr(self.limits, name) for name in _OF_THE_CONTAINER):
            names = ", ".join(_OF_THE_CONTAINER)
            raise SandboxError(f"a program in a container has no larger {names} than the session: open it with these")
        return await self._execute(program, limits)

    async def _with_files(self, program: Program) -> str:
        return printed(await self._execute(program, files_limits(program, self.limits)))

    async def _execute(self, program: Program, limits: SandboxLimits) -> Result:
        if self._closed:
            raise SessionEnded("the session has ended")
        argv = [self._command, "exec", "--interactive", "--workdir", self._work, self.name]
        argv += _started(program.language, program.code)
        result = await run_command(Command(argv=argv, stdin=program.stdin), limits, self.close)
        try:
            return _of_program(result, program.language)
        except SandboxError as error:
            if self._closed or await self._sandbox.runs_still(self.name):
                raise
            await self.close()
            raise SessionEnded("the session has ended: its container was stopped from within") from error

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self.folder is not None:
                self.folder.close()
            await self._sandbox.remove(self)


def _isolation(name: str, limits: SandboxLimits) -> list[str]:
    """Arguments of `run` for all containers: no network, no privileges, and the limits."""
    return [
        f"--name={name}",
        "--network=none",
        "--cap-drop=ALL",
        "--stop-timeout=0",
        "--security-opt=no-new-privileges",
        f"--memory={limits.memory_bytes}",
        f"--memory-swap={limits.memory_bytes}",
        f"--pids-limit={limits.processes}",
        f"--ulimit=cpu={limits.cpu_s}",
        f"--ulimit=fsize={limits.disk_bytes}",
        f"--ulimit=nofile={_DESCRIPTORS}:{_DESCRIPTORS}",
        "--ulimit=core=0",
        "--init",
    ]


def _confinement(limits: SandboxLimits) -> list[str]:
    """Arguments of `run` for programs that need nothing of their image: nobody as user, a read-only root, and a private
    /tmp."""
    return [
        "--read-only",
        f"--tmpfs=/tmp:rw,exec,nosuid,size={limits.disk_bytes},mode=1777",
        "--user=65534:65534",
        "--workdir=/tmp",
        "--env=HOME=/tmp",
    ]


def _problem(argv: Sequence[str]) -> str:
    """Why a command fails; empty if it does not."""
    done = subprocess.run(argv, cwd=FOLDER, capture_output=True, timeout=COMMAND_S, check=False)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"


def _started(language: Language, code: str) -> list[str]:
    """The program's command line in the container."""
    return ["sh", "-c", f'echo "{STARTED}" >&2; exec "$@"', "sh", *INTERPRETERS[language], code]


def _of_program(result: Result, language: Language) -> Result:
    """What the program itself left; raises SandboxError if it was not started.

    A container's exit status does not tell a signal that ended the program from a program that exits as if. Of Python
    it is taken for the signal, and bash reports it in this way itself.
    """
    line, _, stderr = result.stderr.partition("\n")
    if line == STARTED:
        result = replace(result, stderr=stderr)
        of_signal = language is Language.python and _SIGNAL + 1 <= (result.exit_status or 0) <= _SIGNAL + 64
        return replace(result, ended=Ended.killed, exit_status=None) if of_signal else result
    if result.ended is Ended.timeout:
        raise SandboxError("the container did not start before the program's deadline")
    raise SandboxError(f"the container did not start: {result.stderr.strip()}")
