"""The default sandbox: forks of a warm interpreter in namespaces of their own.

The interpreter starts with the first run, and again if it has ended. docs/gateway.md#sandbox says what isolates a run.
"""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

from slimrl.agent.sandbox.forked_session import ForkedSession, folder_archive, run_result
from slimrl.agent.sandbox.interface import Language, Program, Result
from slimrl.agent.sandbox.zygote_client import ZygoteClient, memory_file
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits


class BubblewrapSandbox:
    """Sandbox of processes in namespaces of their own, made by bubblewrap. Used within one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._client: ZygoteClient | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of bwrap, whose descendants are all processes of the sandbox; None before the first run."""
        return self._client.pid if self._client else None

    async def start(self) -> ZygoteClient:
        """The warm interpreter, started if there is none. Raises SandboxError if it cannot be."""
        async with self._starting:
            if self._client is None or self._client.broken:
                client = ZygoteClient(self._config.packages)
                await client.start()
                self._client = client
            return self._client

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        limits = limits or self._config.limits
        client = await self.start()
        start = time.monotonic()
        stdin = memory_file(program.stdin)
        try:
            run = client.spawn({"language": program.language.value, "code": program.code}, limits, stdin=stdin)
        finally:
            os.close(stdin)
        in_time = False
        try:
            in_time = await run.wait(limits.wall_s)
        finally:
            stdout, stderr = await run.end()
        seconds = time.monotonic() - start
        return run_result(run, limits, stdout, stderr, seconds, in_time=in_time)

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> ForkedSession:
        limits = limits or replace(self._config.limits, cpu_s=self._config.session_cpu_s)
        archive = None if folder is None else await asyncio.to_thread(folder_archive, folder)
        try:
            return ForkedSession(await self.start(), language, limits, archive)
        finally:
            if archive is not None:
                os.close(archive)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
