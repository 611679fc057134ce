"""Sandboxes as containers, through the command line of docker or podman.

A run is a container of its own. A session is a container that stays; each execution is a new process in it, so files
remain and variables do not. The image may be another one for each session: that of a trajectory.
"""

import asyncio
import subprocess
import tempfile
import uuid
from dataclasses import replace
from functools import partial
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
_OF_THE_CONTAINER = ("cpu_s", "memory_bytes", "processes", "disk_bytes")
"""Limits that the kernel enforces for all that runs in a container."""
_REMOVALS, _RETRY_S = 3, 0.5
"""podman refuses to remove a container that ends at that moment."""


class ContainerSandbox:
    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sessions: set[ContainerSession] = set()

    async def run(self, program: Program, limits: SandboxLimits | None = None, *, image: str | None = None) -> Result:
        limits = limits or self._config.limits
        name = f"slimrl-{uuid.uuid4().hex}"
        argv = [self._config.command, "run", "--rm", "--interactive", *_isolation(name, limits)]
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
        name = f"slimrl-{uuid.uuid4().hex}"
        argv = [self._config.command, "run", "--rm", "--detach", *_isolation(name, limits)]
        session = ContainerSession(self, self._config.command, name, language, limits)
        self._sessions.add(session)
        try:
            await self._control([*argv, image or self._config.image, "sleep", "infinity"])
            archive = b""
            if folder is not None:
                session.folder = begun = await asyncio.to_thread(ArchivedFolder, folder)
                archive = begun.read()
            unpack = f"mkdir -p {WORK}" + (f" && tar -xf - -C {WORK}" if archive else "")
            await self._control([self._config.command, "exec", "--interactive", name, "sh", "-c", unpack], archive)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        for session in list(self._sessions):
            await session.close()

    async def remove(self, session: "ContainerSession", name: str) -> None:
        self._sessions.discard(session)
        await self._remove(name)

    async def _remove(self, name: str) -> None:
        """End a container, if it has not ended by itself meanwhile."""
        for _ in range(_REMOVALS):
            try:
                return await self._control([self._config.command, "rm", "--force", name])
            except SandboxError as error:
                if "no such container" in str(error).lower():
                    return None
                failure = error
                await asyncio.sleep(_RETRY_S)
        raise failure

    async def _control(self, argv: list[str], stdin: bytes = b"") -> None:
        """Raises SandboxError if the command fails or takes too long. If this is cancelled, it ends with the command:
        nothing could remove a container that is yet to start."""
        command = partial(
            subprocess.run, argv, input=stdin, cwd=FOLDER, capture_output=True, check=True, timeout=COMMAND_S
        )
        running = asyncio.ensure_future(asyncio.to_thread(command))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
        except subprocess.CalledProcessError as error:
            problem = error.stderr.decode(errors="replace").strip()
            raise SandboxError(f"{' '.join(argv[:2])}: {problem}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{' '.join(argv[:2])}: {error}") from error


class ContainerSession(SessionFiles):
    def __init__(
        self, sandbox: ContainerSandbox, command: str, name: str, language: Language, limits: SandboxLimits
    ) -> None:
        self._sandbox, self._command, self._name = sandbox, command, name
        self._language, self._limits = language, limits
        self.folder: SessionFolder | None = None
        """With which it began."""
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        check_code(code)
        limits = replace(self._limits, wall_s=wall_s or self._limits.wall_s)
        return await self._execute(Program(code=code, language=self._language), limits)

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        limits = limits or self._limits
        if any(getattr(limits, name) > getattr(self._limits, name) for name in _OF_THE_CONTAINER):
            names = ", ".join(_OF_THE_CONTAINER)
            raise SandboxError(f"a program in a container has no larger {names} than the session: open it with these")
        return await self._execute(program, limits)

    async def _with_files(self, program: Program) -> str:
        return printed(await self._execute(program, files_limits(program, self._limits)))

    async def _execute(self, program: Program, limits: SandboxLimits) -> Result:
        if self._closed:
            raise SessionEnded("the session has ended")
        argv = [self._command, "exec", "--interactive", "--workdir", WORK, self._name]
        argv += _started(program.language, program.code)
        result = await run_command(Command(argv=argv, stdin=program.stdin), limits, self.close)
        return _of_program(result, program.language)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self.folder is not None:
                self.folder.close()
            await self._sandbox.remove(self, self._name)


def _isolation(name: str, limits: SandboxLimits) -> list[str]:
    """Arguments of `run`: no network, a read-only root, a private /tmp, no privileges, and the limits."""
    return [
        f"--name={name}",
        "--network=none",
        "--read-only",
        f"--tmpfs=/tmp:rw,exec,nosuid,size={limits.disk_bytes},mode=1777",
        "--user=65534:65534",
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
        "--workdir=/tmp",
        "--env=HOME=/tmp",
        "--init",
    ]


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
