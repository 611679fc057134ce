"""What every backend offers: runs of a program, and sessions that keep their state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

from slimrl.config.schema.agent import SandboxLimits

MAX_CODE_BYTES = 100_000
"""Longest code of a program; less than an argument of a process may have (128 KiB)."""


class SandboxError(Exception):
    """The sandbox itself failed; nothing is known of the program."""


class SandboxBusy(SandboxError):
    """Too many runs wait, or one has waited too long."""


class SessionEnded(ValueError):
    """A session was used after its end, by `exit`, a limit or `close`."""


class Language(str, Enum):
    """What a program is written in."""

    python = "python"
    shell = "shell"
    """Commands of bash."""


class Ended(str, Enum):
    """The reason why a run ended."""

    ok = "ok"
    """The program ended with exit status 0."""
    error = "error"
    """The program ended with another exit status: an exception, a failed command."""
    timeout = "timeout"
    """The program was stopped at the limit of wall clock or CPU time."""
    memory = "memory"
    """The program was stopped at the limit of memory, or raised MemoryError."""
    output = "output"
    """The program was stopped at the limit of stdout and stderr."""
    killed = "killed"
    """A signal that the sandbox did not send ended the program: a crash."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Untrusted code. Raises ValueError if it is too long or holds a NUL."""

    code: str
    language: Language = Language.python
    stdin: bytes = b""

    def __post_init__(self) -> None:
        check_code(self.code)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run left: its output, and nothing else."""

    stdout: str
    """Standard output, decoded as UTF-8; U+FFFD replaces bytes that are not. At a limit: what there was until then."""
    stderr: str
    exit_status: int | None
    """Exit status, as a shell's `$?`, of a program that ended itself; None if it was stopped or is not known."""
    ended: Ended
    seconds: float
    """Wall-clock time of the run, without the wait for its turn."""


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A file of a session that differs from the one that the session began with."""

    before: bytes | None
    """Its content at first, of a symbolic link the target; None if there was no such file"""
    after: bytes | None
    """Its content now; None if it was deleted"""


class Session(Protocol):
    """One process that keeps its state: an interpreter's variables, or a shell's directory and variables."""

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        """Run code in the session; at a limit the session ends with it. Raises SessionEnded after that."""

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        """Run a program of its own in the session's folder and files, such as a test suite.

        It sees neither variables nor processes of the session, which goes on if the program reaches a limit.

        Args:
            limits: of this program, also above those of the session; by default the session's.

        Raises:
            SessionEnded: the session has ended.
            SandboxError: the backend cannot give it these limits.
        """

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, with the folders that lead to them.

        Args:
            files: path in the session's folder -> content.

        Raises:
            ValueError: a path leads out of the folder.
            SessionEnded: the session has ended.
            SandboxError: they cannot be written, as with a full disk.
        """

    async def changed(self) -> dict[str, FileChange]:
        """The files that differ from those with which the session began, by their path.

        Folders `__pycache__` and `.pytest_cache` are left out.

        Raises:
            ValueError: the session began without a folder.
            SessionEnded: the session has ended.
            SandboxError: they are too large, or cannot be read.
        """

    async def diff(self) -> str:
        """A unified diff of what `changed` tells, as git writes it: binary, new and deleted files are said. Raises as
        `changed`."""

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """Runs programs. `close` ends all that it has started."""

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        """Run a program from its start to its end; without limits, those of the sandbox.

        Raises:
            SandboxError: the sandbox itself failed.
        """

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> Session:
        """Open a session, in a private copy of `folder` if there is one; its changes are lost with the session."""

    async def close(self) -> None: ...


@runtime_checkable
class ImageSandbox(Protocol):
    """A sandbox that has container images."""

    async def image_session(self, image: str, limits: SandboxLimits) -> Session:
        """Open a session of bash in a container of an image, with the image's user, variables and files, all of which
        it may change, and no network. Programs run in its folder /. There is no `changed` or `diff`.

        Raises:
            SandboxError: the image is not on this machine, among others.
        """


def check_code(code: str) -> None:
    """Raises ValueError for code that is too long, or that no backend could pass on."""
    if "\0" in code:
        raise ValueError("the code holds a NUL character")
    if len(code.encode("utf-8", "replace")) > MAX_CODE_BYTES:
        raise ValueError(f"the code is longer than {MAX_CODE_BYTES} bytes")
