"""The sandbox that the rest of slimrl uses: a backend, behind admission to it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from slimrl.agent.sandbox.admission import Admission
from slimrl.agent.sandbox.bubblewrap import BubblewrapSandbox
from slimrl.agent.sandbox.container import ContainerSandbox
from slimrl.agent.sandbox.interface import (
    FileChange,
    ImageSandbox,
    Language,
    Program,
    Result,
    Sandbox,
    SandboxError,
    Session,
)
from slimrl.agent.sandbox.rlimited import SubprocessSandbox
from slimrl.agent.sandbox.visible import installed, package_paths
from slimrl.agent.supplied import Supplied
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig, SandboxLimits


def _remote(config: SandboxConfig) -> Sandbox:
    # Its HTTP client takes as long to import as all else here together.
    from slimrl.agent.sandbox.remote import RemoteSandbox

    return RemoteSandbox(config)


_BACKENDS: dict[SandboxBackend, Callable[[SandboxConfig], Sandbox]] = {
    SandboxBackend.bubblewrap: BubblewrapSandbox,
    SandboxBackend.subprocess: SubprocessSandbox,
    SandboxBackend.remote: _remote,
    SandboxBackend.container: ContainerSandbox,
}


class SandboxPool(Supplied):
    """A sandbox with back-pressure: runs beyond `max_running` wait, and are refused rather than piled up.

    It starts with its first run. Used within one event loop.

    Args:
        sandbox: the backend; by default the one that the settings name.
    """

    def __init__(self, config: SandboxConfig, sandbox: Sandbox | None = None) -> None:
        self._config = config
        self.use(sandbox or _BACKENDS[config.backend](config))

    def use(self, sandbox: Sandbox, num_nodes: int = 1) -> None:
        """Take another backend, before the first run.

        Args:
            num_nodes: that it has, each with the places of the settings.
        """
        config = self._config
        self._sandbox = sandbox
        queue = partial(Admission, max_waiting=config.max_waiting, wait_s=config.wait_s)
        self._runs = queue(max_running=num_nodes * config.max_running)
        self._sessions = queue(max_running=num_nodes * config.max_sessions)

    def lacks(self, module: str) -> bool:
        """Whether programs cannot import a module that is not the standard library's, as far as the settings say."""
        return self._modules is not None and module not in self._modules

    @cached_property
    def _modules(self) -> set[str] | None:
        """The modules of bubblewrap's packages; None for another backend, of which they are not known."""
        if self._config.backend is not SandboxBackend.bubblewrap:
            return None
        return {path.stem for path in package_paths(installed(self._config.packages))}

    async def run(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        """Raises SandboxBusy, besides what the backend raises."""
        async with self._runs.place():
            return await self._sandbox.run(program, limits)

    async def session(
        self, language: Language = Language.python, *, folder: Path | None = None, limits: SandboxLimits | None = None
    ) -> "PooledSession":
        """Raises SandboxBusy, besides what the backend raises."""
        return await self._admitted(partial(self._sandbox.session, language, folder=folder, limits=limits))

    async def image_session(self, image: str, limits: SandboxLimits) -> "PooledSession":
        """A session in the files of a container image, as `ImageSandbox` has it.

        Raises:
            ValueError: the backend has no images.
            SandboxBusy: as `session`.
        """
        if not isinstance(self._sandbox, ImageSandbox):
            raise ValueError(f"agent.sandbox.backend {self._config.backend.value} has no images. Use container.")
        return await self._admitted(partial(self._sandbox.image_session, image, limits))

    def missing_images(self, images: Sequence[str]) -> list[str]:
        """The images that are not on this machine. Looks at each, and waits for it.

        Raises:
            ValueError: the backend has no images, or its command does not run.
        """
        if self._config.backend is not SandboxBackend.container:
            raise ValueError(f"agent.sandbox.backend {self._config.backend.value} has no images. Use container.")
        try:
            return ContainerSandbox(self._config).missing_images(images)
        except SandboxError as error:
            raise ValueError(str(error)) from error

    async def _admitted(self, opened: Callable[[], Awaitable[Session]]) -> "PooledSession":
        """A session that is opened when there is a place for it."""
        await self._sessions.enter()
        try:
            session = await opened()
        except BaseException:
            self._sessions.leave()
            raise
        return PooledSession(session, self._runs, self._sessions)

    async def close(self) -> None:
        await self._sandbox.close()


class PooledSession:
    """A session whose executions are admitted as runs are; it holds its own place until `close`."""

    def __init__(self, session: Session, runs: Admission, sessions: Admission) -> None:
        self._session, self._runs, self._sessions = session, runs, sessions
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None) -> Result:
        async with self._runs.place():
            return await self._session.run(code, wall_s=wall_s)

    async def run_program(self, program: Program, limits: SandboxLimits | None = None) -> Result:
        async with self._runs.place():
            return await self._session.run_program(program, limits)

    async def put(self, files: Mapping[str, bytes]) -> None:
        async with self._runs.place():
            await self._session.put(files)

    async def changed(self) -> dict[str, FileChange]:
        async with self._runs.place():
            return await self._session.changed()

    async def diff(self) -> str:
        async with self._runs.place():
            return await self._session.diff()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._session.close()
        finally:
            self._sessions.leave()
