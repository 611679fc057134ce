"""Sandboxes as containers, through the command line of docker or podman.

A run is a container of its own. A session is a container that stays; each execution is a new process in it, so files
remain and variables do not. The image may be another one for each session: that of a trajectory.
"""

import asyncio
import io
import subprocess
import tarfile
import uuid
from dataclasses import replace
from pathlib import Path

from slimrl.agent.sandbox.config import Limits, SandboxConfig
from slimrl.agent.sandbox.interface import Language, Program, Result, SandboxError, SessionEnded, check_code
from slimrl.agent.sandbox.process import Command, run_command

COMMAND_S = 120.0
"""Deadline of the start of a container, which may load an image, and of its end."""
WORK = "/tmp/work"
INTERPRETERS = {Language.python: ["python", "-I", "-c"], Language.shell: ["bash", "-c"]}


class ContainerSandbox:
    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sessions: set[ContainerSession] = set()

    async def run(self, program: Program, limits: Limits | None = None, *, image: str | None = None) -> Result:
        limits = limits or self._config.limits
        name = f"slimrl-{uuid.uuid4().hex}"
        argv = [self._config.command, "run", "--rm", "--interactive", *_isolation(name, limits)]
        argv += [image or self._config.image, *INTERPRETERS[program.language], program.code]
        try:
            return await run_command(Command(argv=argv, stdin=program.stdin), limits, lambda: self._remove(name))
        except asyncio.CancelledError:
            await self._remove(name)
            raise

    async def session(
        self,
        language: Language = Language.python,
        *,
        folder: Path | None = None,
        limits: Limits | None = None,
        image: str | None = None,
    ) -> "ContainerSession":
        limits = limits or replace(self._config.limits, cpu_s=self._config.session_cpu_s)
        name = f"slimrl-{uuid.uuid4().hex}"
        argv = [self._config.command, "run", "--rm", "--detach", *_isolation(name, limits)]
        await self._control([*argv, image or self._config.image, "sleep", "infinity"])
        session = ContainerSession(self, self._config.command, name, language, limits)
        self._sessions.add(session)
        try:
            archive = b"" if folder is None else await asyncio.to_thread(_archive, folder)
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
        await self._control([self._config.command, "rm", "--force", name])

    async def _control(self, argv: list[str], stdin: bytes = b"") -> None:
        """Raises SandboxError if the command fails or takes too long."""
        try:
            await asyncio.to_thread(
                subprocess.run, argv, input=stdin, capture_output=True, check=True, timeout=COMMAND_S
            )
        except subprocess.CalledProcessError as error:
            problem = error.stderr.decode(errors="replace").strip()
            raise SandboxError(f"{' '.join(argv[:2])}: {problem}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{' '.join(argv[:2])}: {error}") from error


class ContainerSession:
    def __init__(self, sandbox: ContainerSandbox, command: str, name: str, language: Language, limits: Limits) -> None:
        self._sandbox, self._command, self._name = sandbox, command, name
        self._language, self._limits = language, limits
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        check_code(code)
        if self._closed:
            raise SessionEnded("the session has ended")
        limits = replace(self._limits, wall_s=wall_s or self._limits.wall_s)
        argv = [self._command, "exec", "--workdir", WORK, self._name, *INTERPRETERS[self._language], code]
        return await run_command(Command(argv=argv), limits, self.close)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._sandbox.remove(self, self._name)


def _isolation(name: str, limits: Limits) -> list[str]:
    """Arguments of `run`: no network, a read-only root, a private /tmp, no privileges, and the limits."""
    return [
        f"--name={name}",
        "--network=none",
        "--read-only",
        f"--tmpfs=/tmp:rw,exec,nosuid,size={limits.disk_bytes},mode=1777",
        "--user=65534:65534",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--memory={limits.memory_bytes}",
        f"--memory-swap={limits.memory_bytes}",
        f"--pids-limit={limits.processes}",
        f"--ulimit=cpu={limits.cpu_s}",
        f"--ulimit=fsize={limits.disk_bytes}",
        "--ulimit=core=0",
        "--workdir=/tmp",
        "--env=HOME=/tmp",
        "--init",
    ]


def _archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()
