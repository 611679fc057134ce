"""Programs of `inside/files.py`, and what they print, for all backends whose sessions have files."""

import asyncio
import base64
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from slimrl.agent.sandbox.interface import Ended, FileChange, Program, Result, SandboxError, SessionEnded
from slimrl.agent.sandbox.session_folder import SessionFolder
from slimrl.config.schema.agent import SandboxLimits

FILES_S = 60.0
"""Deadline of a program that reads or writes a session's files."""
FILES_BYTES = 512 * 1024**2
"""Memory of such a program, besides what the session itself may hold and what the program is given."""
PRINTED_BYTES = 32 * 1024**2
"""Most that such a program prints: changes that are larger are an error."""
_SOURCE = Path(__file__).with_name("inside") / "files.py"


class SessionFiles:
    """`put`, `changed` and `diff` of a session, by programs that run in it."""

    folder: SessionFolder | None
    """What the session began with"""
    _closed: bool

    async def _with_files(self, program: Program) -> str:
        """What such a program prints. Raises SandboxError if it fails, SessionEnded if the session has ended."""
        raise NotImplementedError

    async def put(self, files: Mapping[str, bytes]) -> None:
        await self._with_files(put_program(files))

    async def changed(self) -> dict[str, FileChange]:
        return changes(await self._with_files(await self._comparing("changed")))

    async def diff(self) -> str:
        return await self._with_files(await self._comparing("diff"))

    async def _comparing(self, what: str) -> Program:
        if self.folder is None:
            raise ValueError("the session began without a folder, so there is nothing to compare its files with")
        if self._closed:
            raise SessionEnded("the session has ended")
        return comparing_program(what, await asyncio.to_thread(self.folder.read))


def put_program(files: Mapping[str, bytes]) -> Program:
    """Raises ValueError for a path that does not lead to a file in the session's folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                raise ValueError(f"put: {path!r} is no path within the session's folder")
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o644
            archive.addfile(info, io.BytesIO(content))
    return Program(code=f"{_SOURCE.read_text()}\nput()\n", stdin=buffer.getvalue())


def files_limits(program: Program, limits: SandboxLimits) -> SandboxLimits:
    """Limits of such a program in a session with these limits."""
    return replace(
        limits,
        wall_s=FILES_S,
        cpu_s=int(FILES_S),
        memory_bytes=limits.memory_bytes + FILES_BYTES + 2 * len(program.stdin),
        output_bytes=PRINTED_BYTES,
    )


def comparing_program(what: str, archive: bytes | None = None) -> Program:
    """A program that prints the session's changes.

    Args:
        what: `changed` or `diff`.
        archive: tar file of the folder with which the session began; None if it can see that folder itself.
    """
    before = "base()" if archive is None else "archived()"
    return Program(code=f"{_SOURCE.read_text()}\n{what}({before})\n", stdin=archive or b"")


def printed(result: Result) -> str:
    """What such a program has printed. Raises SandboxError if it failed."""
    if result.ended is not Ended.ok:
        lines = result.stderr.strip().split("\n")
        raise SandboxError(f"the session's files cannot be read or written ({result.ended.value}): {lines[-1]}")
    return result.stdout


def changes(text: str) -> dict[str, FileChange]:
    """What the program `changed` has printed."""
    found = json.loads(text)
    return {path: FileChange(before=_content(old), after=_content(new)) for path, (old, new) in found.items()}


def _content(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
