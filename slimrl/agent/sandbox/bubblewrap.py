"""The default sandbox: forks of a warm interpreter in namespaces of their own.

The interpreter starts with the first run, and again if it has ended. docs/gateway.md#sandbox says what isolates a run.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from slimrl.agent.sandbox.base_folders import BaseFolders
from slimrl.agent.sandbox.forked_session import ForkedSession
from slimrl.agent.sandbox.interface import Language, Program, Result
from slimrl.agent.sandbox.session_folder import ArchivedFolder, OverlaidFolder, SessionFolder
from slimrl.agent.sandbox.zygote_client import ZygoteClient
from slimrl.agent.sandbox.zygote_run import run_program
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits


class BubblewrapSandbox:
    """Sandbox of processes in namespaces of their own, made by bubblewrap. Used within one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._client: ZygoteClient | None = None
        self._folders: BaseFolders | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of bwrap, whose descendants are all processes of the sandbox; None before the first run."""
        return self._client.pid if self._client else None

    async def start(self) -> ZygoteClient:
        """The warm interpreter, started if there is none. Raises SandboxError if it cannot be."""
        async with self._starting:
            if self._client is None or self._client.broken:
                self._folders = self._folders or BaseFolders()
                client = ZygoteClient(self._config.packages, self._folders.root)
                await client.start()
                self._client = client
            return self._client

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        return await run_program(await self.start(), program, limits or self._config.limits)

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> ForkedSession:
        limits = limits or replace(self._config.limits, cpu_s=self._config.session_cpu_s)
        client = await self.start()
        begun = None if folder is None else await self._begin(client, folder)
        try:
            session = ForkedSession(client, language, limits, begun)
        except BaseException:
            if begun is not None:
                begun.close()
            raise
        await session.start()
        return session

    async def _begin(self, client: ZygoteClient, folder: Path) -> SessionFolder:
        """An overlay over the folder where the kernel takes it, else a copy."""
        if not client.overlay:
            return await asyncio.to_thread(ArchivedFolder, folder)
        assert self._folders is not None
        return OverlaidFolder(self._folders, await self._folders.take(folder))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._folders is not None:
            self._folders.close()
            self._folders = None
